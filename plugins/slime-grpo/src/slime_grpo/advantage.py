"""Advantages from how a sample's reward compares with the other samples of its prompt group.

A group is all samples with one group id, wherever they stand and however many they are. A group of one has nothing to
be compared with: its advantage is 0 in every estimator here, with or without division by the standard deviation. So is
that of a group whose rewards are all equal, exactly.

Left out of DeepSeekMath: process supervision (its section 4.1.3), and the KL term, which is a loss of its own. Left out
of Dr. GRPO: its constant length normaliser, which is the aggregation's business, not the advantage's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_core import GroupedRewards
from slime_grpo.options import GrpoOptions

__all__ = ["GroupCentred", "GroupRelative", "LeaveOneOut"]

# Added to the standard deviation, in the reward's unit: keeps a group of nearly equal rewards from exploding.
_EPS = 1e-6


class GroupRelative:
    """GRPO: (reward - group mean) / (group standard deviation + 1e-6), unbiased as ``torch.std``.

    Source: DeepSeekMath (2402.03300), section 4.1.2. With ``std_normalization`` off it is the reward minus the mean.
    """

    def __init__(self, options: GrpoOptions | None = None) -> None:
        self._divides = (options or GrpoOptions()).std_normalization

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B], in the order of ``batch``."""
        groups = _Groups.of(batch)
        centred_B = groups.centred(batch.rewards_B)
        if self._divides:
            centred_B = centred_B / (groups.spread(centred_B) + _EPS)
        return centred_B.astype(np.float32)


class GroupCentred:
    """Dr. GRPO: reward - group mean, so that a prompt's weight does not depend on how its rewards scatter.

    Source: Understanding R1-Zero-Like Training (2503.20783), section 3.2.
    """

    def __init__(self, options: GrpoOptions | None = None) -> None:
        del options

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B], in the order of ``batch``."""
        centred_B = _Groups.of(batch).centred(batch.rewards_B)
        return centred_B.astype(np.float32)


class LeaveOneOut:
    """RLOO: reward - mean of the group's other rewards, which is the centred reward times n / (n - 1).

    Source: Back to Basics (2402.14740), the REINFORCE leave-one-out estimator.
    """

    def __init__(self, options: GrpoOptions | None = None) -> None:
        del options

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B], in the order of ``batch``."""
        groups = _Groups.of(batch)
        others_B = np.maximum(groups.sizes_B - 1, 1)
        advantages_B: NDArray[np.float64] = groups.centred(batch.rewards_B) * groups.sizes_B / others_B
        return advantages_B.astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which group (0 .. P-1) each sample belongs to, and how many samples its group has, both int64 [B]."""

    group_B: NDArray[np.int64]
    sizes_B: NDArray[np.int64]

    @staticmethod
    def of(batch: GroupedRewards) -> _Groups:
        _, group_B, sizes_P = np.unique(batch.groups_B, return_inverse=True, return_counts=True)
        return _Groups(group_B, sizes_P[group_B])

    def centred(self, rewards_B: NDArray[np.float32]) -> NDArray[np.float64]:
        """Reward minus group mean; exactly 0 where all are equal, because float64 holds sums of float32 exactly."""
        exact_B = rewards_B.astype(np.float64)
        return exact_B - self._sums(exact_B) / self.sizes_B

    def spread(self, centred_B: NDArray[np.float64]) -> NDArray[np.float64]:
        """The group's unbiased standard deviation at each of its samples; 0 for a group of one."""
        squares_B = self._sums(np.square(centred_B))
        return np.asarray(np.sqrt(squares_B / np.maximum(self.sizes_B - 1, 1)))

    def _sums(self, values_B: NDArray[np.float64]) -> NDArray[np.float64]:
        sums_P = np.bincount(self.group_B, weights=values_B).astype(np.float64)
        return sums_P[self.group_B]
