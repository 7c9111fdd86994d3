"""Advantages from the comparison of a sample's reward with the other samples of its prompt group.

A group is all samples with one group id, in any order and number; a rollout that fanned out into several samples counts
once (:mod:`slime_core.ops.groups`). A group of one rollout has no baseline: its advantage is 0 in every estimator here.
The advantage is also exactly 0 if all rewards of a group are equal. All functions return float32 [B], in the order of
their batch.

Left out of DeepSeekMath: process supervision (its section 4.1.3), and the KL term, which is a separate loss. Left out
of Dr. GRPO: its constant length normaliser, which belongs to the aggregation (``--loss-token-divisor``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slime_core import GroupedRewards
from slime_core.ops.groups import GroupStatistics
from slime_grpo.options import GrpoOptions

__all__ = ["dr_grpo", "grpo", "rloo"]

# Added to the standard deviation, in the reward's unit: a group of nearly equal rewards gets no huge advantages.
_EPS = 1e-6


def grpo(batch: GroupedRewards, options: GrpoOptions) -> NDArray[np.float32]:
    """Return reward minus group mean, divided by the group's standard deviation (DeepSeekMath, 2402.03300).

    The deviation is unbiased, as ``torch.std``, and 1e-6 is added to it. Without ``std_normalization`` nothing is
    divided. Source: section 4.1.2.
    """
    groups = _statistics(batch)
    divisor_B = groups.deviations_B + _EPS if options.std_normalization else 1.0
    return (groups.centred_B / divisor_B).astype(np.float32)


def dr_grpo(batch: GroupedRewards) -> NDArray[np.float32]:
    """Return reward minus group mean (Dr. GRPO, 2503.20783).

    The weight of a prompt does not depend on the spread of its rewards. Source: section 3.2.
    """
    return _statistics(batch).centred_B.astype(np.float32)


def rloo(batch: GroupedRewards) -> NDArray[np.float32]:
    """Return reward minus the mean reward of the group's other rollouts (RLOO, 2402.14740)."""
    return _statistics(batch).against_others_B.astype(np.float32)


def _statistics(batch: GroupedRewards) -> GroupStatistics:
    return GroupStatistics.of(batch.rewards_B, groups_B=batch.groups_B, rollouts_B=batch.rollouts_B)
