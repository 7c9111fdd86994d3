"""Megatron in the process of a test: one rank, on the CPU if there is no GPU; a small shard with micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from slime_core.contracts import MicroBatch
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.modeling import prepare_megatron
from slime_core.modeling.layout import ParallelLayout, initialize_model_parallel
from slime_core.types import StepPlan, TrainBatch

__all__ = [
    "prepare_megatron",
    "small_shard",
    "start_single_rank",
]


def start_single_rank(*, seed: int = 1) -> ParallelLayout:
    """Make this process the only rank of a gloo group and of Megatron's groups; return its layout.

    Can be called once in a process. Computes with one thread, so that results repeat.

    Arguments:
        seed: of Megatron's random numbers.

    Raises:
        RunError: Megatron-core is already imported.
    """
    prepare_megatron()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    layout = ParallelLayout()
    initialize_model_parallel(layout, seed=seed)
    return layout


def small_shard(rollout: int = 0) -> tuple[TrainBatch, list[Sequence[MicroBatch]]]:
    """Return two samples of 2 + 2 and 2 + 1 tokens in one optimizer step of two micro-batches, with filled columns."""
    shard = TrainBatch(
        rollout=rollout,
        tokens_T=np.array([5, 6, 7, 8, 5, 6, 9], dtype=np.int32),
        lengths_B=np.array([4, 3]),
        response_lengths_B=np.array([2, 1]),
        loss_mask_U=np.array([1, 1, 1], dtype=np.int8),
        loss_weights_B=np.array([0.25, 0.5], dtype=np.float32),
        rollout_log_probs_U=np.array([-1, -2, -3], dtype=np.float32),
        columns_B={
            "rewards": np.array([1, 0], dtype=np.float32),
            "advantages": np.array([1, -1], dtype=np.float32),
        },
        steps=(StepPlan(micro_batches=((0,), (1,)), divisor=2.0),),
        indices_B=np.array([0, 1]),
    )
    steps = make_micro_batches(shard)
    for micro in (micro for step in steps for micro in step):
        micro.old_log_probs_U = micro.rollout_log_probs_U.clone()
        micro.ref_log_probs_U = torch.zeros_like(micro.rollout_log_probs_U)
    return shard, [list(step) for step in steps]
