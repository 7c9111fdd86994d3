"""What one data-parallel rank trains of one rollout: flat columns with offsets, and how they are cut into steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.opaque import Opaque

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StepPlan", "TrainBatch"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How one optimizer step of a shard is cut: ``micro_batches[m]`` lists positions of the shard's samples.

    ``divisor`` is the last of the divisors inside the step's loss weights, over all ranks: its rollouts with a trained
    token, or, where tokens are averaged, its trained tokens; at least 1. ``loss_factor`` multiplies the loss and no
    other metric: 1, but where responses are divided by a constant number of tokens.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    divisor: float = 1.0
    loss_factor: float = 1.0


@dataclass(slots=True)
class TrainBatch:
    """The shard of one data-parallel rank: b samples, t packed tokens, u response tokens; flat arrays and offsets.

    Example, two samples of 3 + 2 and 2 + 1 tokens: ``tokens_T`` has 8 entries, ``lengths_B = [5, 3]``,
    ``response_lengths_B = [2, 1]``, and the per-token columns ``loss_mask_U`` and ``rollout_log_probs_U`` have 3.

    Arguments:
        rollout: number of the rollout.
        tokens_T: int64 [t], all samples one after the other.
        lengths_B, response_lengths_B: int64 [b].
        loss_mask_U: float32 [u].
        loss_weights_B: float32 [b]; the loss of a step is ``sum_b loss_weights_B[b] * sum_u loss_mask_U * loss_U``
            over the samples of *all* ranks: every divisor (samples, tokens, siblings) is already inside, so packing,
            order, micro-batches and ranks cannot change it.
        rollout_log_probs_U: float32 [u], the engine's.
        columns_B: further per-sample columns by name, float32 [b]: ``rewards``, and ``advantages`` unless the learner
            is the one that estimates them.
        steps: one plan for each optimizer step.
        indices_B: int64 [b], the samples' ``index``, for records.
        temperature: what the logits are divided by, as the engine did.
        weight_version_B: int64 [b], the version of the weights that sampled the whole response; -1 where several did,
            or an unknown one. None: unknown for all.
        shares_prompts: the plans count a prompt once that several samples of a micro-batch have, token by token.
        routes_TLK: int16 [t, layers, k], the experts that the engine took for each token in each layer; -1 for the last
            token of a sample, which no engine read. None: not requested.
        kept_counts_U: int64 [u], how many tokens each response token was sampled from; 0: all. None: all, everywhere.
        kept_ids_S: int64 [s], those tokens, response token after response token.
        inputs: what samples carry for the model in addition to tokens; names, dtypes and shapes after the first
            dimension are those of the whole rollout, the same on every rank.
    """

    rollout: int
    tokens_T: np.ndarray
    lengths_B: np.ndarray
    response_lengths_B: np.ndarray
    loss_mask_U: np.ndarray
    loss_weights_B: np.ndarray
    rollout_log_probs_U: np.ndarray
    columns_B: dict[str, np.ndarray]
    steps: tuple[StepPlan, ...]
    indices_B: np.ndarray
    temperature: float = 1.0
    weight_version_B: np.ndarray | None = None
    shares_prompts: bool = False
    routes_TLK: np.ndarray | None = None
    kept_counts_U: np.ndarray | None = None
    kept_ids_S: np.ndarray | None = None
    inputs: dict[str, Opaque] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths_B)
