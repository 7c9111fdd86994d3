"""Megatron in a process of a test: one rank, on the CPU where there is no GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime_core.cpu.megatron import install
from slime_core.learner.process import initialize_model_parallel
from slime_core.modeling.layout import ParallelLayout

__all__ = ["prepare_megatron", "start_single_rank"]


def prepare_megatron() -> None:
    """Let Megatron-core and mbridge run without a GPU; does nothing where there is one, or when called again.

    Raises:
        RunError: Megatron-core is already imported; call this first.
    """
    install()


def start_single_rank(*, seed: int = 1) -> ParallelLayout:
    """Make this process the only rank of a gloo group and of Megatron's groups; returns its layout, nothing parallel.

    Can be called once in a process. Computes with one thread, so that results repeat.

    Arguments:
        seed: of Megatron's random numbers.

    Raises:
        RunError: Megatron-core is already imported.
    """
    install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    layout = ParallelLayout()
    initialize_model_parallel(layout, seed=seed)
    return layout
