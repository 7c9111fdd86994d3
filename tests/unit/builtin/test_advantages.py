from __future__ import annotations

import numpy as np

from slime_core import GroupedRewards, RunView, Sample
from slime_core.builtin.losses import NoAdvantage
from slime_core.builtin.rollout import NoReward


def test_the_advantage_is_zero_for_every_reward():
    rewards_B = np.array([1, 0, 5], np.float32)
    counts_B = np.array([1, 2, 3], np.int64)
    found = NoAdvantage(None, RunView()).estimate(GroupedRewards(rewards_B, counts_B, counts_B, counts_B))
    assert found.tolist() == [0, 0, 0]
    assert found.dtype == np.float32


async def test_the_reward_is_zero_for_every_sample():
    assert await NoReward(None, RunView()).score([Sample(response="4", label="4"), Sample()]) == [0.0, 0.0]
