"""A micro-batch that is small enough to reckon by hand."""

from __future__ import annotations

from typing import Any

import torch

from slime_core.learner.micro_batches import PackedMicroBatch


def micro(**columns: Any) -> PackedMicroBatch:
    """Two samples of 3 and 2 tokens: the first with response tokens 0 and 1, the second with token 2; two rollouts."""
    values = {
        "mask_U": [1.0, 1.0, 1.0],
        "weights_U": [0.25, 0.25, 0.5],
        "advantages_U": [2.0, 2.0, -1.0],
        "rollout_log_probs_U": [-1.0, -2.0, -3.0],
        **columns,
    }
    return PackedMicroBatch(
        tokens_1T=torch.tensor([[10, 11, 12, 20, 21]]),
        position_ids_1T=torch.zeros(1, 5, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        num_samples=2,
        lengths=[3, 2],
        rows_U=torch.tensor([0, 1, 3]),
        targets_U=torch.tensor([11, 12, 21]),
        samples_U=torch.tensor([0, 0, 1]),
        places_U=torch.arange(3),
        scale=0.5,
        **{name: torch.tensor(column) for name, column in values.items()},
    )
