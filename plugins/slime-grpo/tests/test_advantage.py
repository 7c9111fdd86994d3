from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core import GroupedRewards, RunView
from slime_grpo.advantage import GroupCentred, GroupRelative, LeaveOneOut
from slime_grpo.options import GrpoOptions

RUN, OPTIONS = RunView(), GrpoOptions()
GRPO, DR_GRPO, RLOO = GroupRelative(OPTIONS, RUN), GroupCentred(OPTIONS, RUN), LeaveOneOut(OPTIONS, RUN)
CENTRED = GroupRelative(GrpoOptions(std_normalization=False), RUN)
ESTIMATORS = [GRPO, CENTRED, DR_GRPO, RLOO]
each = pytest.mark.parametrize("estimator", ESTIMATORS, ids=["grpo", "grpo without std", "dr_grpo", "rloo"])


def batch(rewards, groups):
    ones = np.ones(len(rewards), dtype=np.int64)
    return GroupedRewards(np.float32(rewards), np.int64(groups), ones, ones)


# No deadline: what else the machine does must not decide a test about numbers.
calm = settings(deadline=None, max_examples=50)
rewards_and_groups = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-2, 3)), min_size=1, max_size=24)


def test_grpo_by_hand():
    # mean 0.5, squares 4 * 0.25, unbiased deviation sqrt(1 / 3)
    found = GRPO.estimate(batch([1, 0, 0, 1], [7, 7, 7, 7]))
    one = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert found.tolist() == pytest.approx([one, -one, -one, one], rel=1e-6)
    assert found.dtype == np.float32


def test_grpo_divides_as_torch_does():
    rewards = torch.tensor([0.3, -1.2, 2.5, 0.0, 0.7])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert GRPO.estimate(batch(rewards.tolist(), [3] * 5)).tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_dr_grpo_by_hand():
    assert DR_GRPO.estimate(batch([1, 0, 0, 3], [5, 5, 5, 5])).tolist() == [0.0, -1.0, -1.0, 2.0]


def test_rloo_by_hand():
    # 3 - mean(1, 0, 0); 1 - mean(3, 0, 0); 0 - mean(3, 1, 0)
    found = RLOO.estimate(batch([3, 1, 0, 0], [5, 5, 5, 5]))
    assert found.tolist() == pytest.approx([8 / 3, 0.0, -4 / 3, -4 / 3])


def test_without_the_deviation_grpo_is_dr_grpo():
    given_batch = batch([1, 0, 0.25, 3, -2], [1, 2, 1, 2, 1])
    plain = CENTRED.estimate(given_batch)
    assert plain.tolist() == DR_GRPO.estimate(given_batch).tolist()


@each
def test_groups_are_distinguished_by_id_and_never_by_position(estimator):
    mixed = estimator.estimate(batch([1, 10, 0, 30, 0.5, 20], [-4, 9, -4, 9, -4, 9]))
    first = estimator.estimate(batch([1, 0, 0.5], [0, 0, 0]))
    second = estimator.estimate(batch([10, 30, 20], [0, 0, 0]))
    assert mixed[::2].tolist() == first.tolist()
    assert mixed[1::2].tolist() == second.tolist()


@each
def test_a_group_of_one_has_advantage_zero(estimator):
    assert estimator.estimate(batch([5, 1, 0], [1, 2, 2]))[0] == 0.0


@each
@pytest.mark.parametrize("reward", [0.1, -1e6, 1e-30, 0.0])
def test_equal_rewards_give_exactly_zero(estimator, reward):
    assert estimator.estimate(batch([reward] * 7, [4] * 7)).tolist() == [0.0] * 7


@each
def test_no_samples_give_no_advantages(estimator):
    assert estimator.estimate(batch([], [])).shape == (0,)


@each
@calm
@given(rows=rewards_and_groups, seed=st.integers(0, 2**16))
def test_permuted_samples_give_permuted_advantages(estimator, rows, seed):
    order = np.random.default_rng(seed).permutation(len(rows))
    rewards, groups = np.float32([row[0] for row in rows]), np.int64([row[1] for row in rows])
    whole = estimator.estimate(batch(rewards, groups))
    np.testing.assert_allclose(
        estimator.estimate(batch(rewards[order], groups[order])), whole[order], rtol=1e-5, atol=1e-6
    )


@each
@calm
@given(rows=rewards_and_groups)
def test_advantages_of_a_group_sum_to_zero(estimator, rows):
    rewards, groups = np.float32([row[0] for row in rows]), np.int64([row[1] for row in rows])
    found = estimator.estimate(batch(rewards, groups))
    for group in np.unique(groups):
        assert abs(found[groups == group].sum()) < 1e-3


@each
@calm
@given(rows=rewards_and_groups, other=st.floats(-100, 100, width=32))
def test_a_group_does_not_see_the_others(estimator, rows, other):
    rewards, groups = [row[0] for row in rows], [row[1] for row in rows]
    alone = estimator.estimate(batch(rewards, groups))
    with_others = estimator.estimate(batch([*rewards, other, 0.0], [*groups, 77, 77]))
    assert with_others[:-2].tolist() == alone.tolist()


def test_grpo_does_not_change_with_the_unit_of_the_reward():
    small, large = (GRPO.estimate(batch([scale, 0, 3 * scale], [1, 1, 1])) for scale in (1.0, 1000.0))
    np.testing.assert_allclose(small, large, rtol=1e-5)


def test_a_reward_that_is_not_finite_never_reaches_an_advantage():
    with pytest.raises(ValueError, match="a reward is NaN"):
        GRPO.estimate(batch([1, float("nan")], [0, 0]))


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="std_normalisation"):
        GrpoOptions(std_normalisation=False)
