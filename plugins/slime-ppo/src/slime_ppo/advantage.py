"""REINFORCE++ with a group baseline.

Left out of the paper: the KL penalty inside the reward, which needs log-probabilities of tokens (use the KL loss). The
variant without a baseline is :mod:`slime_ppo.reinforce_plus_plus`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slime_core import GroupedRewards
from slime_core.ops.groups import GroupStatistics

__all__ = ["reinforce_plus_plus_baseline"]

# Under the square root, in the reward's unit squared: if all rewards are equal, the result is 0, not a division by 0.
_EPS = 1e-8


def reinforce_plus_plus_baseline(batch: GroupedRewards) -> NDArray[np.float32]:
    """Return reward minus group mean, whitened over the whole batch (REINFORCE++, 2501.03262).

    Every trained token has its sample's advantage, so mean 0 and variance 1 hold over the batch's trained tokens, and a
    sample weighs by their number. Unlike grpo, one scale applies to the whole batch: the advantages of nearly equal
    rewards in a group stay small.

    Source: the variant with a group-mean baseline and global advantage normalisation.

    Returns:
        Advantages, float32 [B], in the order of ``batch``; all 0 if no token is trained.
    """
    tokens_B = batch.mask_sums_B.astype(np.float64)
    if not tokens_B.any():
        return np.zeros(len(batch), dtype=np.float32)
    groups = GroupStatistics.of(batch.rewards_B, groups_B=batch.groups_B, rollouts_B=batch.rollouts_B)
    shifted_B = groups.centred_B - float(np.average(groups.centred_B, weights=tokens_B))
    variance = float(np.average(np.square(shifted_B), weights=tokens_B))
    return (shifted_B / math.sqrt(variance + _EPS)).astype(np.float32)
