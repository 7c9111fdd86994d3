"""The records of a rollout: the reward of each sample, the rewards as columns, and the shard that a rank trains.

Reward models return the first, advantage estimators read the second, the sampler builds the third for the learner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from slime_core.opaque import Opaque

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Reward = float | dict[str, float]
"""A finite number, or finite numbers by name."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward; a reward model may return it for one sample and rewards for the others.

    Example: ``RewardFailure("timeout", "the judge gave no answer within 30 s")``.

    Arguments:
        cause: one word to count by (``rollout/failures/CAUSE``): ``timeout``, ``memory``, ``crash``, ``invalid``, or
            the name of an exception.
        error: the message for people.
        lost: set by the core: the reward process ended, or ran out of memory, so another call may have caused it.
        own: set by the core: no other call can have caused it, because the process worked only on this call until the
            time limit.
    """

    cause: str
    error: str
    lost: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """The rewards of B samples and the prompt group of each; samples of a group need not be adjacent.

    Example, two groups of two::

        GroupedRewards(rewards_B=np.float32([1, 0, 1, 1]), groups_B=np.int64([7, 7, 9, 9]),
                       lengths_B=np.int64([12, 30, 8, 9]), mask_sums_B=np.int64([12, 18, 8, 9]))

    Arguments:
        rewards_B: float32, finite.
        groups_B: int64, the samples' ``group_index``; any integers.
        lengths_B: int64, response tokens.
        mask_sums_B: int64, response tokens that are trained.
        rollouts_B: int64, the generation that made each sample; siblings share the number, and a generation counts once
            in its group. Any integers. None if each sample has a separate generation.

    Raises:
        ValueError: the columns differ in shape, or a reward is NaN or infinite.
    """

    rewards_B: NDArray[np.float32]
    groups_B: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    mask_sums_B: NDArray[np.int64]
    rollouts_B: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        shapes = {name: column.shape for name, column in columns.items() if column is not None}
        if set(shapes.values()) != {(len(self.rewards_B),)}:
            raise ValueError(f"every column holds one number per sample; found the shapes {shapes}")
        if len(self) and not math.isfinite(float(abs(self.rewards_B).max())):
            raise ValueError("a reward is NaN or infinite; the reward model must return finite numbers")

    def __len__(self) -> int:
        return len(self.rewards_B)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The micro-batches of one optimizer step of a shard: ``micro_batches[m]`` lists positions of the shard's samples.

    ``divisor`` is the last of the divisors inside the step's loss weights, over all ranks: the number of generations
    with a trained token or, where tokens are averaged, of trained tokens; at least 1. ``loss_factor`` multiplies the
    loss and no other metric. It is 1 unless responses are divided by a constant number of tokens.
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
        tokens_T: int32 [t], the tokens of all samples, concatenated.
        lengths_B, response_lengths_B: int64 [b].
        loss_mask_U: int8 [u], 1 trains.
        loss_weights_B: float32 [b]; the loss of a step is ``sum_b loss_weights_B[b] * sum_u loss_mask_U * loss_U``
            over the samples of *all* ranks. The weights include every divisor (samples, tokens, siblings), so packing,
            order, micro-batches and ranks cannot change the loss.
        rollout_log_probs_U: float32 [u], the engine's.
        columns_B: further per-sample columns by name, float32 [b]: ``rewards``, and ``advantages`` unless the learner
            estimates them.
        steps: one plan for each optimizer step.
        indices_B: int64 [b], the samples' ``index``, for records.
        groups_B: int64 [b], the samples' ``group_index``, for records. None if unknown.
        temperature: of the engine. The learner divides its logits by it.
        weight_version_B: int64 [b], the version of the weights that sampled the whole response; -1: several versions,
            or an unknown one, sampled it. None: unknown for all.
        prefix_order_B: int64 [b], an order of the samples in which those that start with the same tokens are adjacent;
            the plans count such tokens once per micro-batch. None: no sample shares tokens.
        prefix_lengths_B: int64 [b], for each place in this order the tokens shared with the sample before.
        routes_TLK: int8 or int16 [t, layers, k], the experts that the engine took for each token in each layer; -1 for
            the last token of a sample, which no engine read. None: not requested.
        kept_counts_U: int64 [u], the truncated-sampling mask: how many tokens top-p and top-k left at each response
            token; 0: sampled from the whole vocabulary. None: no token has a mask.
        kept_ids_S: int64 [s], the ids of these tokens, concatenated over the response tokens.
        engine_columns_U: name -> float32 [u, width], data of the engine for each response token.
        inputs: inputs of the model in addition to tokens. Names, dtypes, and shapes after the first dimension are the
            same on every rank.
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
    prefix_order_B: np.ndarray | None = None
    prefix_lengths_B: np.ndarray | None = None
    routes_TLK: np.ndarray | None = None
    kept_counts_U: np.ndarray | None = None
    kept_ids_S: np.ndarray | None = None
    inputs: dict[str, Opaque] = field(default_factory=dict)
    groups_B: np.ndarray | None = None
    engine_columns_U: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths_B)
