"""Rewards: what a reward model returns for one sample, and those of a rollout as columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GroupedRewards", "Reward", "RewardFailure"]

Reward = float | dict[str, float]
"""A finite number, or finite numbers by name."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward; a reward model may return it in place of one, so that its other samples keep theirs.

    Example: ``RewardFailure("timeout", "the judge gave no answer within 30 s")``.

    Arguments:
        cause: one word to count by (``rollout/failures/CAUSE``): ``timeout``, ``memory``, ``crash``, ``invalid``, or
            the name of an exception.
        error: the message for people.
        lost: set by the core: the reward process ended, or ran out of memory, so another call may have caused it.
        own: set by the core: no other call can have caused it, because the process worked on this call alone until its
            time limit.
    """

    cause: str
    error: str
    lost: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """The rewards of B samples and which prompt group each belongs to; samples of a group may stand anywhere.

    Example, two groups of two::

        GroupedRewards(rewards_B=np.float32([1, 0, 1, 1]), groups_B=np.int64([7, 7, 9, 9]),
                       lengths_B=np.int64([12, 30, 8, 9]), mask_sums_B=np.int64([12, 18, 8, 9]))

    Arguments:
        rewards_B: float32, finite.
        groups_B: int64, the samples' ``group_index``; any integers.
        lengths_B: int64, response tokens.
        mask_sums_B: int64, response tokens that are trained.
        rollouts_B: int64, which rollout each sample is of; samples that one generation fanned out into share it, and
            it counts once in its group. Any integers. None: each sample is a rollout of its own.

    Raises:
        ValueError: the columns differ in shape, or a reward is NaN or infinite.
    """

    rewards_B: NDArray[np.float32]
    groups_B: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    mask_sums_B: NDArray[np.int64]
    rollouts_B: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        shapes = {name: column.shape for name, column in columns.items() if column is not None}
        if set(shapes.values()) != {(len(self.rewards_B),)}:
            raise ValueError(f"every column holds one number a sample; found the shapes {shapes}")
        if len(self) and not math.isfinite(float(abs(self.rewards_B).max())):
            raise ValueError("a reward is NaN or infinite; the reward model must return finite numbers")

    def __len__(self) -> int:
        return len(self.rewards_B)
