"""Statistics of rewards over prompt groups, and every divisor of the loss, in numpy. The sampler calls both.

A group is all samples with one group id, at any position and of any number. Its members are trajectories, called
rollouts here, as in the field ``rollout_id`` of a sample: all samples of one generation. If a trajectory fanned out
into several samples, they share its weight of 1 equally, in the statistics of its group and in the loss.

The divisors of the loss are one weight per sample and one factor per step (docs/architecture.md): the learner sums
weighted losses and divides by nothing, so that packing and the number of ranks cannot change a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupStatistics", "loss_divisor", "loss_factor", "loss_weights"]


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of each sample's group, each float64 [B].

    ``centred_B``, ``against_others_B`` and ``deviations_B`` are 0 in a group of one rollout, and exactly 0 if all
    rewards of a group are equal, because float64 holds sums of float32 exactly.

    Arguments:
        centred_B: reward minus the mean over the group's rollouts.
        against_others_B: reward minus the mean over the group's *other* rollouts.
        deviations_B: unbiased standard deviation over the group's rollouts, as ``torch.std``. If siblings' rewards
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
        """Compute the statistics of B samples.

        Arguments:
            rewards_B: float, finite.
            groups_B: any integers.
            rollouts_B: the rollout that a sample is part of, any integers; one number in two groups means two rollouts.
                None: each sample is one rollout.
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
    """Return each sample's rollout, 0 .. R-1, [B]; each rollout's group, 0 .. P-1, and its number of samples, [R]."""
    pairs = np.stack([groups_B, numbers_B])
    pairs_2R, rollout_B, siblings_R = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    _, group_R = np.unique(pairs_2R[0], return_inverse=True)
    return rollout_B.reshape(-1), group_R, siblings_R


def _over_group(values_R: NDArray[np.float64], group_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum over the rollouts of each group; return the sum at each of its rollouts."""
    return np.asarray(np.bincount(group_R, values_R)[group_R], np.float64)


def loss_weights(
    rollouts_B: NDArray[np.int64], mask_sums_B: NDArray[np.int64], *, per_token: bool
) -> NDArray[np.float32]:
    """Return the weight of each sample's masked loss sum, so that the weighted sum over all samples is the average.

    Per response (default): each rollout's mean over its trained tokens, then the mean over rollouts; siblings that
    share a rollout share one mean. Per token: the mean over all trained tokens (DAPO, 2503.14476, eq. 8).
    Rollouts without a trained token count in neither divisor; their weights are finite, and meet only masks of 0.

    Arguments:
        rollouts_B: int64 [B], the number of each sample's rollout, from 0; siblings share one.
        mask_sums_B: int64 [B], trained tokens of each sample.

    Returns:
        float32 [B], with ``sum(weights * mask_sums) == 1`` unless nothing is trained.
    """
    divisor = loss_divisor(rollouts_B, mask_sums_B, per_token=per_token)
    if per_token:
        return np.full(len(mask_sums_B), 1.0 / divisor, np.float32)
    tokens = np.bincount(rollouts_B, weights=mask_sums_B)
    return np.asarray(1.0 / (divisor * np.maximum(tokens[rollouts_B], 1)), np.float32)


def loss_divisor(rollouts_B: NDArray[np.int64], mask_sums_B: NDArray[np.int64], *, per_token: bool) -> int:
    """Return the last divisor of :func:`loss_weights`: rollouts with a trained token, or trained tokens; at least 1."""
    if per_token:
        return max(int(mask_sums_B.sum()), 1)
    return max(int((np.bincount(rollouts_B, weights=mask_sums_B) > 0).sum()), 1)


def loss_factor(
    rollouts_B: NDArray[np.int64],
    mask_sums_B: NDArray[np.int64],
    *,
    token_divisor: float | None,
    counts_masked: bool = False,
) -> float:
    """Return the factor of the loss, and of no metric, after it was averaged with :func:`loss_weights`.

    Arguments:
        token_divisor: turns the mean over all trained tokens into a mean over rollouts of their summed losses, each
            divided by this constant instead of the trained tokens (Dr. GRPO, 2503.20783, section 3.2). Siblings
            of a rollout share one sum. None: the mean of :func:`loss_weights` stays.
        counts_masked: means over rollouts divide by the number of all rollouts. False: of those with a trained token.
    """
    trained = loss_divisor(rollouts_B, mask_sums_B, per_token=False)
    rollouts = max(len(np.unique(rollouts_B)), 1) if counts_masked else trained
    if token_divisor is None:
        return trained / rollouts
    return loss_divisor(rollouts_B, mask_sums_B, per_token=True) / (token_divisor * rollouts)
