"""REINFORCE++ with a group baseline.

Left out of the paper: the KL penalty inside the reward, which needs log-probabilities of tokens (use the KL loss). The
variant without a baseline is :mod:`slime_ppo.reinforce_plus_plus`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slime_core import GroupedRewards, RunView
from slime_core.ops.groups import GroupStatistics

__all__ = ["ReinforcePlusPlusBaseline"]

# Under the square root, in the reward's unit squared: if all rewards are equal, the result is 0, not a division by 0.
_EPS = 1e-8


class ReinforcePlusPlusBaseline:
    """Reward minus group mean, then whitened over the whole batch: mean 0 and variance 1 over its trained tokens.

    Every trained token has its sample's advantage, so mean and variance weigh a sample by its number of trained tokens.
    Unlike grpo, one scale applies to the whole batch: the advantages of nearly equal rewards in a group stay small.

    Source: REINFORCE++ (2501.03262), the variant with a group-mean baseline and global advantage normalisation.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return advantages, float32 [B], in the order of ``batch``; all 0 if no token is trained."""
        tokens_B = batch.mask_sums_B.astype(np.float64)
        if not tokens_B.any():
            return np.zeros(len(batch), dtype=np.float32)
        centred_B = _statistics(batch).centred_B
        shifted_B = centred_B - float(np.average(centred_B, weights=tokens_B))
        variance = float(np.average(np.square(shifted_B), weights=tokens_B))
        return (shifted_B / math.sqrt(variance + _EPS)).astype(np.float32)


def _statistics(batch: GroupedRewards) -> GroupStatistics:
    return GroupStatistics.of(batch.rewards_B, groups_B=batch.groups_B, rollouts_B=batch.rollouts_B)
