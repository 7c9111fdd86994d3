"""Statistics of prompt groups: unequal sizes, fanned-out rollouts, and what has nothing to be compared with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slime_core.ops.groups import GroupStatistics


def statistics(rewards, groups, rollouts=None) -> GroupStatistics:
    numbers = None if rollouts is None else np.int64(rollouts)
    return GroupStatistics.of(np.float32(rewards), groups_B=np.int64(groups), rollouts_B=numbers)


def test_groups_of_unequal_size_by_hand():
    found = statistics([1, 0, 5, 0, 3], [2, 9, 9, 2, 2])
    third = 4 / 3
    assert found.centred_B.tolist() == pytest.approx([1 - third, -2.5, 2.5, -third, 3 - third])
    assert found.against_others_B.tolist() == pytest.approx([1 - 1.5, -5, 5, 0 - 2, 3 - 0.5])
    deviation = math.sqrt(((1 - third) ** 2 + third**2 + (3 - third) ** 2) / 2)
    assert found.deviations_B.tolist() == pytest.approx([deviation, math.sqrt(12.5), math.sqrt(12.5), *[deviation] * 2])


def test_a_rollout_that_fanned_out_counts_once():
    whole = statistics([1, 0, 0], [4, 4, 4])
    fanned = statistics([1, 1, 1, 0, 0], [4] * 5, [7, 7, 7, 8, 9])
    for column in ("centred_B", "against_others_B", "deviations_B"):
        straight, split = getattr(whole, column), getattr(fanned, column)
        assert split.tolist() == pytest.approx([*[straight[0]] * 3, straight[1], straight[2]])


def test_siblings_with_rewards_of_their_own_keep_them():
    # Rollout 1 is worth 0.5: the group's mean is (0.5 + 0) / 2.
    found = statistics([1, 0, 0], [0, 0, 0], [1, 1, 2])
    assert found.centred_B.tolist() == [0.75, -0.25, -0.25]
    assert found.against_others_B.tolist() == [1.0, 0.0, -0.5]
    assert found.deviations_B[0] == pytest.approx(math.sqrt((0.75**2 + 0.25**2) / 2 + 0.25**2))


@pytest.mark.parametrize("rewards", [[5], [5, 1, 0]])
def test_one_rollout_is_compared_with_nothing(rewards):
    found = statistics(rewards, [3] * len(rewards), [1] * len(rewards))
    for column in (found.centred_B, found.against_others_B, found.deviations_B):
        assert column.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("reward", [0.1, -1e6, 1e-30])
def test_equal_rewards_are_at_distance_exactly_zero_also_where_rollouts_fan_out(reward):
    found = statistics([reward] * 7, [1] * 7, [0, 0, 0, 1, 1, 2, 3])
    for column in (found.centred_B, found.against_others_B, found.deviations_B):
        assert column.tolist() == [0.0] * 7


def test_one_rollout_number_in_two_groups_stands_for_two_rollouts():
    assert statistics([1, 0, 1, 0], [1, 1, 2, 2], [0, 1, 0, 1]).deviations_B.tolist() == [math.sqrt(0.5)] * 4
    assert statistics([], []).centred_B.shape == (0,)
