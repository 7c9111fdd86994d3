"""Examines torch in a separate process.

    python -m slime_doctor.probe                              facts about torch, as JSON
    python -m slime_doctor.probe reduce RANK BACKEND FILE     one of two ranks that add up their numbers

``slime doctor`` starts it, and reports a torch that does not load, hangs, or kills its process.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

RANKS = 2
LIMIT_S = 300


def torch_facts() -> dict[str, object]:
    """Return the libraries that this torch was built with, and the GPUs that it can use."""
    import torch

    usable = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())] if usable else []
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    return {
        "cuda": torch.version.cuda or "",
        "devices": names,
        "nccl": nccl,
        "gloo": torch.distributed.is_gloo_available(),
    }


def reduce(rank: int, backend: str, file: str) -> float:
    """Add 1 and 2 with the other rank; with NCCL, on GPU ``rank``."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=limit)
    numbers = torch.full((1024,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return float(numbers.mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["reduce", rank, backend, file]:
            print(reduce(int(rank), backend, file))
        case _:
            print(json.dumps(torch_facts()))
