"""The group-relative estimator of slime-grpo, broken in one place."""

from __future__ import annotations

import pytest

from slime_core.testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite

REGISTRATION = """
from slime_core import AdvantageTraits, Component, hookimpl

@hookimpl
def slime_register_advantage_estimators():
    traits = AdvantageTraits(reads={"rewards", "groups"})
    yield Component("mine", target=f"{__name__}:GroupRelative", traits=traits)
"""
SPREAD = "(groups.spread(centred_B) + _EPS)"
CENTRED = "exact_B - self._sums(exact_B) / self.sizes_B"
RETURNED = (
    "            centred_B = centred_B / (groups.spread(centred_B) + _EPS)\n        return centred_B.astype(np.float32)"
)
UNIQUE = "np.unique(batch.groups_B, return_inverse"
BLOCKS = "np.unique(np.cumsum(np.diff(batch.groups_B, prepend=0) != 0), return_inverse"

GALLERY = {
    "no epsilon": (SPREAD, "groups.spread(centred_B)", "constant_rewards_give_finite_advantages", "needs an epsilon"),
    "epsilon too small": (
        "_EPS = 1e-6",
        "_EPS = 1e-15",
        "a_negligible_difference_of_rewards_stays_negligible",
        "no epsi",
    ),
    "deviation of the batch": (
        "groups.spread(centred_B)",
        "batch.rewards_B.std()",
        "other_groups_change_nothing",
        "taken over the whole batch",
    ),
    "mean of the batch": (CENTRED, "exact_B - exact_B.mean()", "other_groups_change_nothing", "whole batch"),
    "input changed": (
        "groups = _Groups.of(batch)\n        centred_B = groups",
        "groups = _Groups.of(batch)\n        batch.rewards_B[:] += 1\n        centred_B = groups",
        "the_batch_is_not_changed",
        "changed its input: rewards_B",
    ),
    "groups taken as blocks": (
        UNIQUE,
        BLOCKS,
        "permuting_the_samples_permutes_the_advantages",
        "where in the batch a sample stands",
    ),
    "sorted": (
        RETURNED,
        RETURNED.replace("return centred_B", "return np.sort(centred_B)"),
        "permuting_the_samples_permutes_the_advantages",
        "return the order that came in",
    ),
    "the id is a number": (
        RETURNED,
        RETURNED.replace(
            "return centred_B", "centred_B = centred_B * (1 + 0.01 * batch.groups_B)\n        return centred_B"
        ),
        "group_ids_are_names_without_meaning",
        "any integers may be ids",
    ),
    "the wrong sign": (
        CENTRED,
        "self._sums(exact_B) / self.sizes_B - exact_B",
        "a_higher_reward_in_a_group_never_has_the_lower_advantage",
        "the better one has the lower advantage",
    ),
    "float64": (
        RETURNED,
        RETURNED.replace(".astype(np.float32)", ""),
        "every_sample_gets_one_finite_float32_number",
        "float32 is wanted",
    ),
    "one number for the batch": (
        RETURNED,
        RETURNED.replace("return centred_B", "return centred_B[:1]"),
        "every_sample_gets_one_finite_float32_number",
        "of shape",
    ),
    "reads what it does not say": (
        RETURNED,
        RETURNED.replace("return centred_B", "centred_B = centred_B / batch.lengths_B\n        return centred_B"),
        "only_the_columns_that_the_traits_name_are_read",
        "reads=['groups', 'rewards']",
    ),
}


@pytest.fixture
def source(first_party) -> str:
    return first_party("plugins/slime-grpo/src/slime_grpo/advantage.py", REGISTRATION)


@pytest.mark.parametrize("name", GALLERY)
def test_a_broken_estimator_is_caught_by_the_property_that_names_it(name, source, broken, violation):
    old, new, prop, words = GALLERY[name]
    assert words in violation(AdvantageEstimatorSuite, broken(source, old, new), prop)


def test_an_estimator_that_says_so_may_look_at_other_groups(source, broken, suite_of):
    whitened = broken(source, "groups.spread(centred_B)", "batch.rewards_B.std()")
    said = broken(whitened, '"groups"})', '"groups"}, across_groups=True)')
    suite_of(AdvantageEstimatorSuite, said)().test_other_groups_change_nothing()


def test_the_suite_of_the_other_scope_says_which_one_to_take(source, violation):
    message = violation(TokenAdvantageEstimatorSuite, source, "the_traits_say_scope_token")
    assert message == "the traits say scope 'sample'; test it with AdvantageEstimatorSuite"
