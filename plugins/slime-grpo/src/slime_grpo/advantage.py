"""Advantages from the comparison of a sample's reward with the other samples of its prompt group.

A group is all samples with one group id, in any order and number; a rollout that fanned out into several samples counts
once (:mod:`slime_core.ops.groups`). A group of one rollout has no baseline: its advantage is 0 in every estimator here.
The advantage is also exactly 0 if all rewards of a group are equal.

Left out of DeepSeekMath: process supervision (its section 4.1.3), and the KL term, which is a separate loss. Left out
of Dr. GRPO: its constant length normaliser, which belongs to the aggregation (``--loss-token-divisor``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slime_core import GroupedRewards, RunView
from slime_core.ops.groups import GroupStatistics
from slime_grpo.options import GrpoOptions

__all__ = ["GroupCentred", "GroupRelative", "LeaveOneOut"]

# Added to the standard deviation, in the reward's unit: a group of nearly equal rewards gets no huge advantages.
_EPS = 1e-6


class GroupRelative:
    """GRPO: (reward - group mean) / (group standard deviation + 1e-6), unbiased as ``torch.std``.

    Source: DeepSeekMath (2402.03300), section 4.1.2. Without ``std_normalization`` it is the reward minus the mean.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        self._divides = options.std_normalization

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return the advantages, float32 [B], in the order of ``batch``."""
        groups = _statistics(batch)
        divisor_B = groups.deviations_B + _EPS if self._divides else 1.0
        return (groups.centred_B / divisor_B).astype(np.float32)


class GroupCentred:
    """Dr. GRPO: reward - group mean, so that a prompt's weight does not depend on the spread of its rewards.

    Source: Understanding R1-Zero-Like Training (2503.20783), section 3.2.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        del options, run

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return the advantages, float32 [B], in the order of ``batch``."""
        return _statistics(batch).centred_B.astype(np.float32)


class LeaveOneOut:
    """RLOO: reward - mean reward of the group's other rollouts.

    Source: Back to Basics (2402.14740), the REINFORCE leave-one-out estimator.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        del options, run

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return the advantages, float32 [B], in the order of ``batch``."""
        return _statistics(batch).against_others_B.astype(np.float32)


def _statistics(batch: GroupedRewards) -> GroupStatistics:
    return GroupStatistics.of(batch.rewards_B, groups_B=batch.groups_B, rollouts_B=batch.rollouts_B)
