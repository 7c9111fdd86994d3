from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slime_core import GroupedRewards


def batch(rewards: list[Any], groups: list[Any]) -> GroupedRewards:
    ones = np.ones(len(rewards), dtype=np.int64)
    return GroupedRewards(np.asarray(rewards, np.float32), np.asarray(groups, np.int64), ones, ones)


def test_columns_of_different_length_are_refused_with_their_shapes() -> None:
    with pytest.raises(ValueError, match=r"'groups_B': \(1,\)"):
        batch([1, 0], [0])


def test_a_matrix_of_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rewards_B': \(2, 2\)"):
        batch([[1, 0], [0, 1]], [[0, 0], [1, 1]])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="NaN"):
        batch([1, reward, 0], [0, 0, 0])
