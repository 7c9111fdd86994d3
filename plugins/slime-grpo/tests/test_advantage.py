"""The group-relative estimators: by hand, and what holds for each of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core import GroupedRewards
from slime_grpo.advantage import dr_grpo, grpo, rloo
from slime_grpo.options import GrpoOptions

GRPO = partial(grpo, options=GrpoOptions())
CENTRED = partial(grpo, options=GrpoOptions(std_normalization=False))
each = pytest.mark.parametrize(
    "estimate", [GRPO, CENTRED, dr_grpo, rloo], ids=["grpo", "grpo without std", "dr_grpo", "rloo"]
)
few = settings(max_examples=50)
rewards_and_groups = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-2, 3)), min_size=1, max_size=24)


def batch(rewards, groups) -> GroupedRewards:
    ones = np.ones(len(rewards), dtype=np.int64)
    return GroupedRewards(np.float32(rewards), np.int64(groups), ones, ones)


# grpo: mean 0.5, squares 4 * 0.25, unbiased deviation sqrt(1 / 3). rloo: 3 - mean(1, 0, 0); 1 - mean(3, 0, 0); ...
ONE = 0.5 / (math.sqrt(1 / 3) + 1e-6)
BY_HAND = {
    "grpo": (GRPO, [1, 0, 0, 1], [ONE, -ONE, -ONE, ONE]),
    "dr_grpo": (dr_grpo, [1, 0, 0, 3], [0, -1, -1, 2]),
    "rloo": (rloo, [3, 1, 0, 0], [8 / 3, 0, -4 / 3, -4 / 3]),
}


@pytest.mark.parametrize(("estimate", "rewards", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(estimate, rewards, expected) -> None:
    advantages_B = estimate(batch(rewards, [7] * 4))
    assert advantages_B.tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages_B.dtype == np.float32


def test_grpo_divides_as_torch_does() -> None:
    rewards = torch.tensor([0.3, -1.2, 2.5, 0.0, 0.7])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert GRPO(batch(rewards.tolist(), [3] * 5)).tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_without_the_deviation_grpo_is_dr_grpo() -> None:
    mixed = batch([1, 0, 0.25, 3, -2], [1, 2, 1, 2, 1])
    assert CENTRED(mixed).tolist() == dr_grpo(mixed).tolist()


@each
def test_groups_are_distinguished_by_id_and_never_by_position(estimate) -> None:
    mixed = estimate(batch([1, 10, 0, 30, 0.5, 20], [-4, 9, -4, 9, -4, 9]))
    assert mixed[::2].tolist() == estimate(batch([1, 0, 0.5], [0, 0, 0])).tolist()
    assert mixed[1::2].tolist() == estimate(batch([10, 30, 20], [0, 0, 0])).tolist()


@each
def test_a_group_without_differences_has_advantages_of_exactly_zero(estimate) -> None:
    for reward in (0.1, -1e6, 1e-30, 0.0):
        assert estimate(batch([reward] * 7, [4] * 7)).tolist() == [0.0] * 7
    assert estimate(batch([5, 1, 0], [1, 2, 2]))[0] == 0.0
    assert estimate(batch([], [])).shape == (0,)


@each
@few
@given(rows=rewards_and_groups)
def test_the_advantages_of_a_group_sum_to_zero(estimate, rows) -> None:
    rewards, groups = zip(*rows, strict=True)
    advantages_B = estimate(batch(rewards, groups))
    for group in set(groups):
        assert abs(advantages_B[np.array(groups) == group].sum()) < 1e-3


def test_grpo_does_not_change_with_the_unit_of_the_reward() -> None:
    small, large = (GRPO(batch([scale, 0, 3 * scale], [1, 1, 1])) for scale in (1.0, 1000.0))
    np.testing.assert_allclose(small, large, rtol=1e-5)


def test_a_reward_that_is_not_finite_never_reaches_an_advantage() -> None:
    with pytest.raises(ValueError, match="NaN"):
        GRPO(batch([1, float("nan")], [0, 0]))
