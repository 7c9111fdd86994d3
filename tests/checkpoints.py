"""Writes a checkpoint's copies on all ranks at once; in a run, each rank has a thread that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy


def write_copies(copies: Sequence[StateCopy]) -> None:
    """Collective over all ranks; Megatron is prepared already."""
    from slime_core.checkpoint import sharded

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [one.write() for one in copies])
    if dist.get_rank() == 0:
        sharded.finish([part for rank in parts for part in rank])
    dist.barrier()
