"""Part 8: a process group of one rank, over NCCL with a GPU and gloo without, and an update group beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_kit.report import DEVICE, ON_GPU, report, report_equal, seconds, sized
from slime_core.weights import Backend
from slime_core.weights.engine_control import serve_store
from slime_core.weights.transports import UpdateGroup

BACKEND: Backend = "nccl" if ON_GPU else "gloo"
NUMBERS = sized(2**26, 2**12)


class NoEngines:
    """What UpdateGroup calls of an engine's control, for no engines: the group has one member."""

    ranks = ()

    def check_alive(self) -> None:
        """Nothing to check."""

    def init_group(self, **_: object) -> None:
        """Nobody joins."""

    def destroy_group(self, name: str) -> None:
        """Nobody leaves."""


def main() -> None:
    """Report collectives of both groups."""
    store = serve_store("127.0.0.1", world_size=1, timeout=timedelta(seconds=60))
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    report("backend", dist.get_backend(), expected="nccl with a GPU", ok=dist.get_backend() == BACKEND)
    values = torch.arange(NUMBERS, device=DEVICE, dtype=torch.float32)
    total, gathered = values.clone(), torch.empty_like(values)
    dist.all_reduce(total)
    check("all_reduce", total, values)
    dist.all_gather([gathered], values)
    check("all_gather", gathered, values)
    if ON_GPU:  # gloo has none
        dist.reduce_scatter(gathered.zero_(), [values])
        check("reduce_scatter", gathered, values)
    dist.all_to_all_single(gathered.zero_(), values)
    check("all_to_all", gathered, values)
    time_s, size = seconds(lambda: dist.all_reduce(total)), f"{values.nbytes / 2**20:g} MiB"
    report("all_reduce of one rank", 1e3 * time_s, "ms", expected=size)
    control: Any = NoEngines()
    group = UpdateGroup(control, backend=BACKEND, timeout_s=60.0)
    flat = values.view(torch.uint8).clone()
    group.broadcast(flat).wait()
    check("broadcast of the update group", flat.view(torch.float32), values)
    group.close()
    dist.destroy_process_group()


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    report_equal(name, torch.equal(found, expected))


if __name__ == "__main__":
    main()
