"""The group-relative estimator of slime-grpo, broken in one place."""

from __future__ import annotations

import pytest

from slime_testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite

REGISTRATION = """
from slime_core import AdvantageTraits, Component, hookimpl

@hookimpl
def slime_register_advantage_estimators():
    traits = AdvantageTraits(reads={"rewards", "groups", "rollouts"})
    yield Component("mine", target=f"{__name__}:GroupRelative", traits=traits)

@hookimpl
def slime_options():
    return GrpoOptions
"""
SPREAD = "np.sqrt(_over_group(squares_R, group_R) / others_R)"
CENTRED = "rewards_B - (sums_R / counts_R)[rollout_B]"
RETURNED = "(groups.centred_B / divisor_B).astype(np.float32)"

GALLERY = {
    "no epsilon": ("groups.deviations_B + _EPS", "groups.deviations_B", "constant_rewards_give_finite_advantages"),
    "epsilon too small": ("_EPS = 1e-6", "_EPS = 1e-15", "a_negligible_difference_of_rewards_stays_negligible"),
    "deviation of the batch": (SPREAD, "np.full(len(group_R), rewards_B.std())", "other_groups_change_nothing"),
    "mean of the batch": (CENTRED, "rewards_B - rewards_B.mean()", "other_groups_change_nothing"),
    "input changed": (
        "groups = _statistics(batch)\n",
        "groups = _statistics(batch)\n        batch.rewards_B[:] += 1\n",
        "the_batch_is_not_changed",
    ),
    "groups taken as blocks": (
        "pairs = np.stack([groups_B, numbers_B])",
        "pairs = np.stack([np.cumsum(np.diff(groups_B, prepend=0) != 0), numbers_B])",
        "permuting_the_samples_permutes_the_advantages",
    ),
    "sorted": (RETURNED, f"np.sort({RETURNED})", "permuting_the_samples_permutes_the_advantages"),
    "the id is a number": (
        RETURNED,
        RETURNED.replace("(groups", "((1 + 0.01 * batch.groups_B) * groups"),
        "group_ids_are_names_without_meaning",
    ),
    "the wrong sign": (
        CENTRED,
        "(sums_R / counts_R)[rollout_B] - rewards_B",
        "a_higher_reward_in_a_group_never_has_the_lower_advantage",
    ),
    "float64": (RETURNED, RETURNED.replace(".astype(np.float32)", ""), "every_sample_gets_one_finite_float32_number"),
    "one number for the batch": (RETURNED, f"{RETURNED}[:1]", "every_sample_gets_one_finite_float32_number"),
    "reads what it does not say": (
        RETURNED,
        RETURNED.replace("divisor_B", "divisor_B / batch.lengths_B"),
        "only_the_columns_that_the_traits_name_are_read",
    ),
    "siblings counted each": (
        "numbers_B = np.arange(len(rewards_B)) if rollouts_B is None else rollouts_B",
        "numbers_B = np.arange(len(rewards_B))",
        "a_rollout_that_fanned_out_counts_once",
    ),
}


@pytest.fixture
def source(first_party) -> str:
    """Both in one file, so that either can be broken."""
    statistics = first_party("slime_core/ops/groups.py", "")
    estimator = first_party("plugins/slime-grpo/src/slime_grpo/advantage.py", REGISTRATION)
    for line in ("from __future__ import annotations\n", "from slime_core.ops.groups import GroupStatistics\n"):
        assert line in estimator
        estimator = estimator.replace(line, "")
    return statistics + estimator


@pytest.mark.parametrize("name", GALLERY)
def test_a_broken_estimator_is_caught_by_the_property_that_names_it(name, source, broken, violation):
    old, new, prop, *error = GALLERY[name]
    violation(AdvantageEstimatorSuite, broken(source, old, new), prop, *error)


def test_an_estimator_that_says_so_may_look_at_other_groups(source, broken, suite_of):
    whitened = broken(source, SPREAD, "np.full(len(group_R), rewards_B.std())")
    declared = broken(whitened, '"rollouts"})', '"rollouts"}, across_groups=True)')
    suite_of(AdvantageEstimatorSuite, declared)().test_other_groups_change_nothing()


def test_the_suite_of_the_other_scope_says_which_one_to_take(source, violation):
    assert "AdvantageEstimatorSuite" in violation(TokenAdvantageEstimatorSuite, source, "the_traits_say_scope_token")
