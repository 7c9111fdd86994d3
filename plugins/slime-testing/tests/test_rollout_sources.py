"""A rollout source that is right, and broken in one place."""

from __future__ import annotations

import pytest

from slime_testing import RolloutSourceSuite
from slime_testing.suite import properties

SOURCE = """
from slime_core import Component, Status, hookimpl

@hookimpl
def slime_register_rollout_sources():
    yield Component("mine", target=f"{__name__}:Answers")

class Answers:
    def __init__(self, options, run):
        self.made = 0

    async def fill(self, batch):
        while batch.missing:
            groups = batch.prompts.next_groups(batch.missing)
            for sample in (one for group in groups for one in group):
                sample.tokens, sample.response_length = [3, 4, 5], 2
                sample.rollout_log_probs, sample.reward = [-0.5, -0.25], 1.0
                sample.status = Status.COMPLETED
            await batch.add(groups)
            self.made += len(groups)
        return {"rollout/made": self.made}

    def state(self):
        return {"made": self.made}

    def restore(self, state):
        self.made = state["made"]
"""
GENERATES = (
    SOURCE.replace(
        "for sample in (one for group in groups for one in group):",
        """for group in groups:
                context, sampling = batch.generation(group[0])
                await generate_group(context, group, sampling)
            for sample in ():""",
    )
    .replace("from slime_core import", "from slime_core.generation import generate_group\nfrom slime_core import")
    .replace(
        "            await batch.add",
        "            for sample in (one for group in groups for one in group):\n"
        "                pass\n            await batch.add",
    )
)
BROKEN = {
    "adds nothing": ("await batch.add(groups)", "return {}", "a_rollout_has_groups"),
    "pending": ("sample.status = Status.COMPLETED", "pass", "a_rollout_has_groups"),
    "a log-prob too few": ("[-0.5, -0.25]", "[-0.5]", "a_rollout_has_groups"),
    "no prompt": ("[3, 4, 5], 2", "[3, 4], 2", "a_rollout_has_groups"),
    "NaN": ("[-0.5, -0.25], 1.0", "[-0.5, -0.25], float('nan')", "a_rollout_has_groups"),
    "loses a prompt": (
        "batch.prompts.next_groups(batch.missing)",
        "batch.prompts.next_groups(batch.missing + 1)[1:]",
        "a_prompt_that_was_taken",
    ),
    "adds twice": ("add(groups)", "add([*groups, *groups])", "no_sample_is_there_twice"),
    "no metrics": ('return {"rollout/made": self.made}', "pass", "the_metrics_are_finite"),
    "a metric of text": ("self.made}\\n\\n    def state", '"two"}\\n\\n    def state', "the_metrics_are_finite"),
    "forgets": ('self.made = state["made"]', "pass", "another_source_continues"),
    "a state that JSON cannot hold": ('{"made": self.made}\\n\\n    def r', "{1, 2}\\n\\n    def r", "another"),
    "fails": ("while batch.missing", "while batch.mising", "a_rollout_has_groups", "AttributeError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = BROKEN[name]
    old, new = (text.replace("\\n", "\n") for text in (old, new))
    (whole,) = [one.removeprefix("test_") for one in properties(RolloutSourceSuite) if prop in one]
    violation(RolloutSourceSuite, broken(SOURCE, old, new), whole, *error)


@pytest.mark.parametrize(
    "change",
    [
        "sample.tokens = [*list(sample.tokens)[:-1], 9]",
        "sample.rollout_log_probs = [-0.1] * sample.response_length",
        "sample.weight_versions = []",
    ],
)
def test_a_source_that_changes_answers_of_the_engine_is_caught(change, broken, violation):
    source = broken(GENERATES, "                pass\n", f"                {change}\n")
    violation(RolloutSourceSuite, source, "what_the_engine_sampled_is_added_as_it_was_sampled")


@pytest.mark.parametrize("name", properties(RolloutSourceSuite))
def test_a_source_that_generates_holds_every_property(name, suite_of):
    getattr(suite_of(RolloutSourceSuite, GENERATES)(), name)()


@pytest.mark.parametrize("name", properties(RolloutSourceSuite))
def test_the_right_source_holds_every_property(name, suite_of):
    getattr(suite_of(RolloutSourceSuite, SOURCE)(), name)()
