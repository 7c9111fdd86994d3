"""Statistics of rewards over prompt groups, in numpy and float64.

A group is all samples with one group id, at any position and of any number. Its members are rollouts: where one rollout
fanned out into several samples, they share its weight of 1 equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupStatistics"]


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of each sample's group, each float64 [B].

    A group of one rollout has nothing to be compared with: there ``centred_B``, ``against_others_B`` and
    ``deviations_B`` are 0. Where all rewards of a group are equal they are exactly 0 as well: float64 holds sums of
    float32 exactly.

    Arguments:
        centred_B: reward minus the mean over the group's rollouts.
        against_others_B: reward minus the mean over the group's *other* rollouts.
        deviations_B: unbiased standard deviation over the group's rollouts, as ``torch.std``. Where siblings' rewards
            differ, their spread within a rollout adds to it: the square root of the rollouts' mean squares, summed and
            divided by their number less 1. Rewards (1, 0) of one rollout and 0 of another give 0.61; those of the
            rollouts' means, 0.5 and 0, would give 0.35.
    """

    centred_B: NDArray[np.float64]
    against_others_B: NDArray[np.float64]
    deviations_B: NDArray[np.float64]

    @staticmethod
    def of(
        rewards_B: NDArray[np.float32] | NDArray[np.float64],
        *,
        groups_B: NDArray[np.int64],
        rollouts_B: NDArray[np.int64] | None = None,
    ) -> GroupStatistics:
        """The statistics of B samples.

        Arguments:
            rewards_B: float, finite.
            groups_B: any integers.
            rollouts_B: which rollout of its group a sample is of, any integers; one number in two groups stands for two
                rollouts. None: each sample is a rollout of its own.
        """
        rewards_B = np.asarray(rewards_B, np.float64)
        numbers_B = np.arange(len(rewards_B)) if rollouts_B is None else rollouts_B
        rollout_B, group_R, siblings_R = _rollouts(groups_B, numbers_B)
        rewards_R = np.bincount(rollout_B, rewards_B, len(group_R)) / siblings_R
        sums_R, counts_R = _over_group(rewards_R, group_R), _over_group(np.ones(len(group_R)), group_R)
        others_R = np.maximum(counts_R - 1, 1)
        centred_B = rewards_B - (sums_R / counts_R)[rollout_B]
        squares_R = np.bincount(rollout_B, np.square(centred_B), len(group_R)) / siblings_R
        deviations_R = np.sqrt(_over_group(squares_R, group_R) / others_R)
        against_others_B = rewards_B - ((sums_R - rewards_R) / others_R)[rollout_B]
        compared_B = counts_R[rollout_B] > 1
        columns_B = (centred_B, against_others_B, deviations_R[rollout_B])
        return GroupStatistics(*(np.where(compared_B, column_B, 0.0) for column_B in columns_B))


def _rollouts(
    groups_B: NDArray[np.int64], numbers_B: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each sample's rollout, 0 .. R-1, [B]; each rollout's group, 0 .. P-1, and its number of samples, [R]."""
    pairs = np.stack([groups_B, numbers_B])
    found, rollout_B, siblings_R = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    _, group_R = np.unique(found[0], return_inverse=True)
    return rollout_B.reshape(-1), group_R, siblings_R


def _over_group(values_R: NDArray[np.float64], group_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """The sum over the rollouts of each one's group, at each rollout."""
    return np.asarray(np.bincount(group_R, values_R)[group_R], np.float64)
