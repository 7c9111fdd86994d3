"""The process group over which learner rank 0 broadcasts weights to all processes of all engines.

The group exists in addition to the default groups of learner and engines. A server joins it with
``init_custom_process_group`` (sglang 0.5.23, srt/utils/common.py:2859): a TCP store, under a prefix of its name, and
torch's private helper for groups outside the default one. Rank 0 serves the store and calls the same helper, so
sglang is not imported here; both run the same torch.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import EngineControl, Sending

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


Backend = Literal["gloo", "nccl"]


class UpdateGroup:
    """Rank 0's side of the group; made by :func:`join_update_group`."""

    def __init__(self, name: str, control: EngineControl, process_group: Any, store: Any) -> None:
        self.name = name
        self._control = control
        self._process_group = process_group
        self._store = store  # rank 0 serves it: it has to live as long as the group

    def broadcast(self, flat: torch.Tensor) -> Sending:
        """Start sending ``flat`` to every engine; returns at once. Keep the tensor until the result has been waited
        for."""
        import torch.distributed as dist

        sending: Sending | None = dist.broadcast(flat, src=0, group=self._process_group, async_op=True)
        if sending is None:
            raise WeightSyncError(f"update group {self.name}: this process is not a member")
        return sending

    def close(self) -> None:
        """Destroy the group on all engines and here; engines that have died are not an error."""
        import torch.distributed as dist

        with suppress(WeightSyncError):
            self._control.destroy_group(self.name)
        dist.destroy_process_group(self._process_group)


def join_update_group(
    control: EngineControl, *, name: str, backend: Backend, address: str = "127.0.0.1", timeout_s: float = 120.0
) -> UpdateGroup:
    """Form the group of rank 0 and every engine.

    Arguments:
        control: the engines; their ranks start at 1, in its order.
        name: of the group, to which the port is added: torch takes each name once a process.
        backend: ``"nccl"`` where engines and learner have GPUs of their own, else ``"gloo"``.
        address: of this process as the engines see it; a free port is chosen.
        timeout_s: limit for joining, and of each broadcast.

    Raises:
        WeightSyncError: an engine refused, or not all joined within ``timeout_s``.
    """
    control.check_alive()  # rank 0 cannot stop waiting for a member that never joins
    limit = timedelta(seconds=timeout_s)
    world_size = 1 + sum(control.ranks)
    store = serve_store(address, world_size=world_size, timeout=limit)
    name = f"{name}-{store.port}"
    with ThreadPoolExecutor(1, thread_name_prefix="update-group") as thread:
        engines = thread.submit(
            control.init_group, master_address=address, master_port=store.port, group=name, backend=backend
        )
        try:
            process_group = _create(name, backend=backend, store=store, world_size=world_size, timeout=limit)
        except (RuntimeError, ValueError) as error:
            engines.result()  # an engine's own error explains more than our time-out
            raise WeightSyncError(f"update group {name} over {address}:{store.port} was not formed: {error}") from error
        engines.result()
    return UpdateGroup(name, control, process_group, store)


_reserved: dict[tuple[str, int], socket.socket] = {}
"""Sockets that reserve ports for later stores, by address and port."""


def reserve_port(address: str) -> int:
    """A port of ``address`` that no other process can take until this one, or a fork of it, serves a store there.

    Raises:
        OSError: ``address`` is not of this machine.
    """
    listener = socket.create_server((address, 0), family=_family(address))
    port = int(listener.getsockname()[1])
    _reserved[address, port] = listener
    return port


def serve_store(address: str, *, world_size: int, timeout: timedelta, port: int = 0) -> TCPStore:
    """The rendezvous store of ``world_size`` processes, served by this one on ``address`` and no other interface.

    Returns at once; the others connect with ``TCPStore(address, store.port, world_size, is_master=False)``.

    Arguments:
        address: IP address of this process as the others see it.
        world_size: number of processes, this one included.
        timeout: limit of every later wait in the store.
        port: to listen on, such as one that was reserved; 0: a free one.

    Raises:
        OSError: ``address`` is not of this machine, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Without a socket the store listens on all interfaces. It owns the socket that it is given, and closes it.
    listener = _reserved.pop((address, port), None) or socket.create_server(
        (address, port), family=_family(address), backlog=world_size
    )
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _create(name: str, *, backend: Backend, store: Any, world_size: int, timeout: timedelta) -> Any:
    # torch 2.13, distributed_c10d.py: private, but the only way to a group whose members share no default group.
    from torch.distributed import distributed_c10d as c10d

    process_group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(world_size)}
    return process_group
