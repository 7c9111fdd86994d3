"""Weights travel through memory that learner and engines share: one machine, nothing copied over a network.

A server takes, for each of its processes, a pickle of one flat tensor and a list of what lies where in it (sglang
0.5.23, srt/model_executor/model_runner_components/weight_updater.py, ``_update_weights_from_flattened_bucket``). Of the
tensor the pickle holds a handle only, the bytes are in shared memory:

    on a CPU    a file in /dev/shm; torch starts a helper for it, ``torch_shm_manager``, which ends after the last
                process that it served.
    on GPUs     a CUDA IPC handle for an engine's process on a GPU that this process sees too; all others read the file
                in /dev/shm, which is right on every machine, and slower.

Trust: the learner only writes pickles, it reads none. A server unpickles what it is sent, from an allowed list of names
(srt/utils/common.py, ``SafeUnpickler``), so a client that reaches its port decides what it loads: servers listen on
loopback unless other nodes have to reach them. Nothing of sglang is imported here: the list's entries are plain
namespaces, which are allowed and have the attributes that the server asks for.
"""

from __future__ import annotations

import base64
import io
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime_core.errors import WeightSyncError
from slime_core.weights.bucket import Bucket, flatten
from slime_core.weights.engine_control import EngineControl

if TYPE_CHECKING:
    import torch

__all__ = ["TensorTransport"]

SHARED = Path("/dev/shm")

DEVICE_ARGUMENT = 6
"""Position of the device's index in a pickled CUDA tensor; a server also takes a GPU's UUID there, because its numbers
may be others than ours (srt/utils/patch_torch.py)."""

MB = 10**6


class TensorTransport:
    """A :class:`~slime_core.weights.transport.Transport` through shared memory.

    Arguments:
        control: the engines, all of them on this machine.
        gpus: UUID of the GPU of each process of each engine, one tuple an engine, in the order of ``control.urls``;
            empty: not known, all of them read from /dev/shm.

    Raises:
        WeightSyncError: an engine runs elsewhere.
    """

    def __init__(self, control: EngineControl, *, gpus: Sequence[Sequence[str]] = ()) -> None:
        _require_local(control.urls)
        self._control = control
        self._gpus = gpus or [[""] * ranks for ranks in control.ranks]
        self._version = ""

    def begin(self, version: str) -> None:
        """See the protocol."""
        self._version = version
        self._control.begin_update()

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """See the protocol. What was shared is free again afterwards, also if an engine refused."""
        with _shared(flatten(tensors), self._gpus) as copies:
            payloads = [[_payload(bucket, copy) for copy in of_engine] for of_engine in copies]
            self._control.update_from_tensor(payloads, version=self._version if last else None, flush_cache=last)

    def end(self) -> None:
        """See the protocol."""
        self._control.end_update()

    def close(self) -> None:
        """See the protocol."""


def _require_local(urls: Sequence[str]) -> None:
    remote = [url for url in urls if not _is_here(urlsplit(url).hostname or "")]
    if remote:
        raise WeightSyncError(
            f"Asked to publish weights through shared memory (--update-weight-transport tensor) to {remote[0]}; it is "
            "not on the learner's machine. Choose distributed, or disk with a shared folder."
        )


def _is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine: only those can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


@contextmanager
def _shared(flat: torch.Tensor, gpus: Sequence[Sequence[str]]) -> Iterator[list[list[torch.Tensor]]]:
    """Copies of ``flat`` that each process of each engine can read; the engines free them within the block."""
    devices = _visible_gpus() if flat.is_cuda else {}
    copies = {uuid: flat.to(device) for uuid, device in devices.items() if any(uuid in ranks for ranks in gpus)}
    if all(uuid in copies for ranks in gpus for uuid in ranks):
        yield [[copies[uuid] for uuid in ranks] for ranks in gpus]
    else:
        host = flat.cpu()
        with _named(host):
            yield [[copies.get(uuid, host) for uuid in ranks] for ranks in gpus]
    if copies:
        _collect()


@contextmanager
def _named(flat: torch.Tensor) -> Iterator[None]:
    """The bytes of ``flat`` are in a file of /dev/shm inside the block. Its name is removed after it, and its memory
    when the last process closes it.

    torch removes the name when its reference count reaches zero. The count is wrong once a server refuses a handle
    without opening it, so one extra reference is counted here, and the name is removed explicitly.
    """
    free = shutil.disk_usage(SHARED).free
    if flat.nbytes > free:  # writing to a full /dev/shm is no error but a SIGBUS
        raise WeightSyncError(
            f"Asked to share {flat.nbytes / MB:.1f} MB of weights; {SHARED} has {free / MB:.1f} MB free. Give it more "
            "(docker run --shm-size), or lower --update-weight-buffer-size."
        )
    storage = flat.untyped_storage()
    _, handle, _ = storage._share_filename_cpu_()  # what torch.multiprocessing's file_system strategy does
    storage._shared_incref()
    try:
        yield
    finally:
        SHARED.joinpath(handle.decode().lstrip("/")).unlink(missing_ok=True)


def _payload(bucket: Bucket, flat: torch.Tensor) -> str:
    """The payload of one process of a server: base64 of a pickle, which can be read only once."""
    from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy

    strategy = get_sharing_strategy()
    # The other strategy passes file descriptors, which needs a common parent process: the server would die.
    set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump({"flattened_tensor": flat, "metadata": list(_places(bucket))})
    finally:
        set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def _places(bucket: Bucket) -> Iterator[SimpleNamespace]:
    """The attributes of ``FlattenedTensorMetadata`` (srt/weight_sync/tensor_bucket.py), one a weight."""
    import torch

    start = 0
    for spec in bucket.specs:
        yield SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=start,
            end_idx=start + spec.nbytes,
            numel=spec.nbytes,
        )
        start += spec.nbytes


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID; everything else as torch.multiprocessing does."""

    def reducer_override(self, value: Any) -> Any:
        """What the pickle of a CUDA tensor holds; ``NotImplemented`` for anything else."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


def _visible_gpus() -> dict[str, torch.device]:
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {str(torch.cuda.get_device_properties(device).uuid): device for device in devices}


def _collect() -> None:
    import torch

    torch.cuda.ipc_collect()  # frees blocks that the engines have closed
