"""A rollout source, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_testing import RolloutSourceSuite

SAMPLED = "sample.status = Status.COMPLETED"
SOURCE = f"""
from slime_core import Status

class Answers:
    def __init__(self):
        self.made = 0

    async def fill(self, batch):
        while batch.missing:
            groups = batch.prompts.next_groups(batch.missing)
            for sample in (sample for group in groups for sample in group):
                sample.tokens, sample.response_length = [3, 4, 5], 2
                sample.rollout_log_probs, sample.reward = [-0.5, -0.25], 1.0
                {SAMPLED}
            await batch.add(groups)
            self.made += len(groups)
        return {{"rollout/made": self.made}}

    def state(self):
        return {{"made": self.made}}

    def restore(self, state):
        self.made = state["made"]
"""
ADDED = 'rollout_source("mine", Answers)'
GENERATES = """
from slime_core.generation import generate_group

class Answers:
    async def fill(self, batch):
        groups = batch.prompts.next_groups(batch.missing)
        for group in groups:
            context, sampling = batch.generation(group[0])
            await generate_group(context, group, sampling)
            for sample in group:
                pass
        await batch.add(groups)
        return {}

    def state(self):
        return {}

    def restore(self, state):
        pass
"""
TRAINABLE = "a_rollout_has_groups_of_samples_that_can_be_trained"
RESUMES = "another_source_continues_from_its_state"
METRICS = "the_metrics_are_finite_numbers"
BROKEN = {
    "adds nothing": ("await batch.add(groups)", "return {}", TRAINABLE),
    "pending": (SAMPLED, "pass", TRAINABLE),
    "a log-prob too few": ("[-0.5, -0.25]", "[-0.5]", TRAINABLE),
    "no prompt": ("[3, 4, 5], 2", "[3, 4], 2", TRAINABLE),
    "NaN": ("[-0.5, -0.25], 1.0", "[-0.5, -0.25], float('nan')", TRAINABLE),
    "fails": ("while batch.missing", "while batch.mising", TRAINABLE, "AttributeError"),
    "loses a prompt": ("(batch.missing)", "(batch.missing + 1)[1:]", "a_prompt_that_was_taken_is_added_or_put_back"),
    "adds twice": ("add(groups)", "add([*groups, *groups])", "no_sample_is_there_twice"),
    "no metrics": ('return {"rollout/made": self.made}', "pass", METRICS),
    "a metric of text": ('{"rollout/made": self.made}', '{"rollout/made": "two"}', METRICS),
    "forgets": ('self.made = state["made"]', "pass", RESUMES),
    "a state that JSON cannot hold": ('{"made": self.made}', "{1, 2}", RESUMES),
}
CHANGES = (
    "sample.tokens = [*list(sample.tokens)[:-1], 9]",
    "sample.rollout_log_probs = [-0.1] * sample.response_length",
    "sample.weight_versions = []",
)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(RolloutSourceSuite, SOURCE, ADDED, BROKEN[name])


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_answers_of_the_engine_is_caught(change: str, violation: Callable[..., str]) -> None:
    case = ("pass\n        await", f"{change}\n        await", "what_the_engine_sampled_is_added_as_it_was_sampled")
    violation(RolloutSourceSuite, GENERATES, ADDED, case)


@pytest.mark.parametrize("source", [SOURCE, GENERATES], ids=["without an engine", "with an engine"])
def test_right_ones_hold_every_property(source: str, holds: Callable[..., None]) -> None:
    holds(RolloutSourceSuite, source, ADDED)
