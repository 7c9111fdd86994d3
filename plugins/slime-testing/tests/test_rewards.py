"""The exact-match reward of the core, broken in one place; and sample transforms."""

from __future__ import annotations

import pytest

from slime_testing import RewardModelSuite, SampleTransformSuite, waiting
from slime_testing.suite import properties

REWARD = """
import asyncio, random, time
from slime_core import Component, RewardTraits, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("mine", target=f"{__name__}:ExactMatch")
"""
SCORE = 'return [float(sample.response.strip() == label_text(sample, "exact_match")) for sample in samples]'
REWARDS = {
    "out of order": (
        SCORE,
        SCORE.replace("[", "sorted(").replace("]", ")"),
        "rewards_come_in_the_order_of_the_samples",
    ),
    "relative to the batch": (
        SCORE,
        SCORE.replace("return", "found =") + "\n        return [one - sum(found) / len(found) for one in found]",
        "a_batch_gets_the_rewards_of_its_samples_alone",
    ),
    "one reward for all": (SCORE, "return [1.0]", "every_sample_gets_one_finite_reward"),
    "not a number": (SCORE, "return [float('nan') for sample in samples]", "every_sample_gets_one_finite_reward"),
    "other numbers than it declares": (
        'target=f"{__name__}:ExactMatch"',
        'target=f"{__name__}:ExactMatch", traits=RewardTraits(numbers={"acc"})',
        "every_reward_has_the_numbers_that_are_declared",
    ),
    "samples changed": (
        SCORE,
        "for sample in samples: sample.reward = 1.0\n        " + SCORE,
        "the_samples_are_not_changed",
    ),
    "swallows its cancellation": (
        SCORE,
        "try: await asyncio.sleep(3600)\n        except asyncio.CancelledError: pass\n        " + SCORE,
        "it_can_be_cancelled",
    ),
    "goes on after its cancellation": (
        SCORE,
        "for _ in range(20):\n            try:\n                await asyncio.sleep(0.5)\n"
        "            except asyncio.CancelledError:\n                pass\n        " + SCORE,
        "it_can_be_cancelled",
    ),
    "a perfect response that is not": (
        SCORE,
        SCORE + "\n\n    @staticmethod\n    def perfect_response(label):\n        return f'Answer: {label}'",
        "a_perfect_response_gets_full_marks",
    ),
    "a row that is refused": (
        SCORE,
        SCORE + "\n\n    @staticmethod\n    def check_row(label, metadata):\n        return 'it is not mine'",
        "rows_are_checked",
    ),
    "always right": (SCORE, "return [1.0 for sample in samples]", "the_examples_get_different_rewards"),
    "holds the event loop": (SCORE, "time.sleep(2.5)\n        " + SCORE, "it_can_be_cancelled"),
}

LATE = {"goes on after its cancellation", "holds the event loop"}
"""Those that are caught by the clock."""

TRANSFORM = """
from slime_core import Component, Transformed, TransformTraits, hookimpl

@hookimpl
def slime_register_sample_transforms():
    yield Component("mine", target=f"{__name__}:Shaped", traits=TransformTraits(scope="group"))

class Shaped:
    def __init__(self, options, run): pass

    def __call__(self, samples):
        if len({sample.reward for sample in samples}) == 1:
            return Transformed(samples, dropped="zero_std")
        kept = [sample for sample in samples if sample.reward >= 0]
        for sample in kept:
            sample.reward = 2 * sample.reward
        return Transformed(kept, changed={"negative": len(samples) - len(kept)})
"""
RETURNED = 'return Transformed(kept, changed={"negative": len(samples) - len(kept)})'
DOUBLED = "sample.reward = 2 * sample.reward"
TRANSFORMS = {
    "samples lost": (RETURNED, "return Transformed(kept)", "a_sample_that_is_left_out_is_counted"),
    "handed on twice": (RETURNED, "return Transformed([*kept, kept[-1]])", "no_sample_is_invented_or_handed_on_twice"),
    "invented": (
        RETURNED,
        "import dataclasses\n        return Transformed([*kept, dataclasses.replace(kept[0], index=999)])",
        "no_sample_is_invented_or_handed_on_twice",
    ),
    "not a number": (
        DOUBLED,
        "sample.reward = sample.reward / sample.reward if sample.reward else float('nan')",
        "rewards_stay_finite_and_masks_stay_masks",
    ),
    "a mask of the tokens": (
        DOUBLED,
        "sample.loss_mask = [0] * len(sample.tokens)",
        "rewards_stay_finite_and_masks_stay_masks",
    ),
    "a response cut": (DOUBLED, "sample.tokens = sample.tokens[:-1]", "what_the_engine_sampled_is_not_changed"),
    "a reason without words": ('dropped="zero_std"', 'dropped=""', "reasons_are_words_and_counts_are_numbers"),
    "a count without a number": (
        'changed={"negative": len(samples) - len(kept)}',
        'changed={"negative": -1}',
        "reasons_are_words_and_counts_are_numbers",
    ),
    "the samples alone": (RETURNED, "return kept", "every_group_has_one_answer"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_broken_reward_is_caught_by_the_property_that_names_it(name, first_party, broken, violation, monkeypatch):
    if name in LATE:
        monkeypatch.setattr(waiting, "LIMIT_S", 2.0)
    old, new, prop, *error = REWARDS[name]
    source = broken(first_party("slime_core/builtin/rollout.py", REWARD), old, new)
    violation(RewardModelSuite, source, prop, *error)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_broken_transform_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = TRANSFORMS[name]
    violation(SampleTransformSuite, broken(TRANSFORM, old, new), prop, *error)


@pytest.mark.parametrize("name", properties(SampleTransformSuite))
@pytest.mark.parametrize("scope", ["group", "rollout"])
def test_the_right_transform_holds_every_property(name, scope, broken, suite_of):
    whole = "    def __call__(self, groups):\n        return [self.one(samples) for samples in groups]\n\n    def one("
    source = TRANSFORM
    if scope == "rollout":
        source = broken(broken(source, 'scope="group"', 'scope="rollout"'), "    def __call__(", whole)
    getattr(suite_of(SampleTransformSuite, source)(), name)()


def test_braces_of_a_response_stand_for_themselves(first_party, suite_of):
    responses = ("\\boxed{{label}}", '{"answer": {label}}', "{}", "{0}")
    tested = suite_of(RewardModelSuite, first_party("slime_core/builtin/rollout.py", REWARD), responses=responses)()
    found = [sample.response for sample in tested._samples()]
    assert found == ["\\boxed{42}", '{"answer": 42}', "{}", "{0}"]
