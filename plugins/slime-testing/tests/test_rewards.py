"""A reward model and a sample transform, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_testing import RewardModelSuite, SampleTransformSuite, waiting

SCORE = "return [float(sample.response.strip() == sample.label) for sample in samples]"
REWARD = f"""
import asyncio, time

class Reward:
    async def score(self, samples):
        {SCORE}
"""
ADDED = 'reward_model("mine", Reward)'
REWARDS = {
    "out of order": (SCORE, f"return sorted({SCORE[7:]})", "rewards_come_in_the_order_of_the_samples"),
    "relative to the batch": (
        SCORE,
        f"rewards = {SCORE[7:]}\n        return [reward - sum(rewards) / len(rewards) for reward in rewards]",
        "a_batch_gets_the_rewards_of_its_samples_alone",
    ),
    "one reward for all": (SCORE, "return [1.0]", "every_sample_gets_one_finite_reward"),
    "not a number": (SCORE, "return [float('nan') for sample in samples]", "every_sample_gets_one_finite_reward"),
    "other numbers than declared": ("Reward)", 'Reward, numbers={"acc"})', "every_reward_has_the_declared_numbers"),
    "samples changed": (
        SCORE,
        f"for sample in samples: sample.reward = 1.0\n        {SCORE}",
        "the_samples_are_not_changed",
    ),
    "swallows its cancellation": (
        SCORE,
        f"try: await asyncio.sleep(3600)\n        except asyncio.CancelledError: pass\n        {SCORE}",
        "it_can_be_cancelled",
    ),
    "continues after its cancellation": (
        SCORE,
        "for _ in range(20):\n            try: await asyncio.sleep(0.5)\n"
        f"            except asyncio.CancelledError: pass\n        {SCORE}",
        "it_can_be_cancelled",
    ),
    "holds the event loop": (SCORE, f"time.sleep(2.5)\n        {SCORE}", "it_can_be_cancelled"),
    "a perfect response that is not": (
        SCORE,
        f"{SCORE}\n\n    @staticmethod\n    def perfect_response(label):\n        return f'Answer: {{label}}'",
        "a_perfect_response_gets_full_marks",
    ),
    "a row that is refused": (
        SCORE,
        f"{SCORE}\n\n    @staticmethod\n    def check_row(label, metadata):\n        return 'it is not mine'",
        "rows_are_checked",
    ),
    "always right": (SCORE, "return [1.0 for sample in samples]", "the_examples_get_different_rewards"),
}
BY_CLOCK = {"continues after its cancellation", "holds the event loop"}

RETURNED = 'return Transformed(kept, changed={"negative": len(samples) - len(kept)})'
DOUBLED = "sample.reward = 2 * sample.reward"
TRANSFORM = f"""
from slime_core import Transformed

class Shaped:
    def __call__(self, samples):
        if len({{sample.reward for sample in samples}}) == 1:
            return Transformed(samples, dropped="zero_std")
        kept = [sample for sample in samples if sample.reward >= 0]
        for sample in kept:
            {DOUBLED}
        {RETURNED}
"""
SHAPED = 'sample_transform("mine", Shaped)'
TRANSFORMS = {
    "samples lost": (RETURNED, "return Transformed(kept)", "a_sample_that_is_left_out_is_counted"),
    "handed on twice": (RETURNED, "return Transformed([*kept, kept[-1]])", "no_sample_is_invented_or_handed_on_twice"),
    "invented": (
        RETURNED,
        "import dataclasses\n        return Transformed([*kept, dataclasses.replace(kept[0], index=999)])",
        "no_sample_is_invented_or_handed_on_twice",
    ),
    "not a number": (DOUBLED, "sample.reward = float('nan')", "rewards_stay_finite_and_masks_stay_masks"),
    "a mask of the tokens": (
        DOUBLED,
        "sample.loss_mask = [0] * len(sample.tokens)",
        "rewards_stay_finite_and_masks_stay_masks",
    ),
    "a response cut": (DOUBLED, "sample.tokens = sample.tokens[:-1]", "what_the_engine_sampled_is_not_changed"),
    "a reason without words": ('"zero_std"', '""', "reasons_are_words_and_counts_are_numbers"),
    "a negative count": ("len(samples) - len(kept)", "-1", "reasons_are_words_and_counts_are_numbers"),
    "the samples alone": (RETURNED, "return kept", "every_group_has_one_answer"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_broken_reward_is_caught(name: str, violation: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in BY_CLOCK:
        monkeypatch.setattr(waiting, "LIMIT_S", 2.0)
    violation(RewardModelSuite, REWARD, ADDED, REWARDS[name])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_broken_transform_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(SampleTransformSuite, TRANSFORM, SHAPED, TRANSFORMS[name])


def test_right_ones_hold_every_property(holds: Callable[..., None]) -> None:
    holds(RewardModelSuite, REWARD, ADDED)
    holds(SampleTransformSuite, TRANSFORM, SHAPED)


def test_functions_and_whole_rollouts_hold_every_property(holds: Callable[..., None]) -> None:
    function = REWARD.replace(
        "class Reward:\n    async def score(self, samples):", "if True:\n    async def Reward(samples):"
    )
    holds(RewardModelSuite, function, ADDED)
    rollout = TRANSFORM + "\nclass All:\n    def __call__(self, groups):\n        return list(map(Shaped(), groups))\n"
    holds(SampleTransformSuite, rollout, 'sample_transform("mine", All, scope="rollout")')


def test_braces_of_a_response_are_literal(suite_of: Callable[..., Any]) -> None:
    responses = ("\\boxed{{label}}", '{"answer": {label}}', "{}", "{0}")
    tested = suite_of(RewardModelSuite, REWARD, ADDED, responses=responses)()
    assert [sample.response for sample in tested._samples()] == ["\\boxed{42}", '{"answer": 42}', "{}", "{0}"]
