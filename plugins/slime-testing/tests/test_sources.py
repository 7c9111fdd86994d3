"""The data source of the core, broken in one place; and trackers."""

from __future__ import annotations

import pytest

from slime_testing import DataSourceSuite, TrackerSuite
from slime_testing.suite import properties

SOURCE = """
import itertools
from dataclasses import replace
from slime_core import Component, hookimpl

class PromptFiles(NumberedPrompts):
    def __init__(self, options, run):
        request = requested(run)
        super().__init__(Held(request), request)

    @classmethod
    def screen(cls, options, run, prompts):
        return [*prompts(requested(run).path, setting="prompt_data")]

@hookimpl
def slime_register_data_sources():
    yield Component("mine", target=f"{__name__}:PromptFiles")

SEEDS = itertools.count()
"""
STATE = 'return {"next": self._next, "returned": list(self._returned), **self._order_comes_from, **place}'
SCREEN = 'return [*prompts(requested(run).path, setting="prompt_data")]'
RESTORED = 'self._next, self._returned = cast(int, state["next"]), list(cast(list[int], state["returned"]))'
PUT_BACK = "self._returned.extend([_number(group) for group in groups])"
SOURCES = {
    "does not resume": (RESTORED, 'self._returned = list(state["returned"])', "it_resumes_the_same_stream"),
    "resumes one group too early": (
        RESTORED,
        RESTORED.replace('cast(int, state["next"])', 'cast(int, state["next"]) + 1'),
        "it_resumes_the_same_stream",
    ),
    "a seed of its own": (
        "Held(request)",
        "Held(replace(request, seed=next(SEEDS)))",
        "reading_the_state_changes_nothing",
    ),
    "loses what was put back": (PUT_BACK, "pass", "what_was_put_back_comes_first"),
    "hands it out last": (
        "returned, self._returned = self._returned[:n], self._returned[n:]",
        "returned, self._returned = self._returned[n:], self._returned[:n]",
        "what_was_put_back_comes_first",
    ),
    "forgets it in the state": (
        '"returned": list(self._returned), **',
        '"returned": [], **',
        "what_was_put_back_survives_a_restart",
    ),
    "groups of one": ("for i in range(size)", "for i in range(1)", "groups_have_the_requested_size"),
    "too few groups": (
        "return [self._group(number) for number in [*returned, *fresh]]",
        "return [self._group(number) for number in [*returned, *fresh]][:2]",
        "groups_have_the_requested_size",
    ),
    "one index for a group": (
        "index=number * size + i",
        "index=number",
        "samples_are_pending_and_distinguished_by_their_numbers",
    ),
    "group numbers of an epoch": (
        "group_index=number",
        "group_index=number % 7",
        "samples_are_pending_and_distinguished_by_their_numbers",
    ),
    "a state that JSON cannot hold": (
        STATE,
        STATE.replace("list(self._returned)", "set(self._returned)"),
        "it_resumes_the_same_stream",
    ),
    "says nothing of rows that it leaves out": (
        SCREEN,
        SCREEN.replace("return ", "") + "\n        return []",
        "screening_reports_every_row_that_the_run_will_leave_out",
    ),
    "goes on after what ends the run": (
        SCREEN,
        f"try:\n            {SCREEN}\n        except Exception:\n            return []",
        "screening_passes_on_what_ends_the_run",
    ),
    "changes what it looks at": (
        SCREEN,
        'requested(run).path.write_text(\'{"prompt": "a", "label": "b"}\\n\')\n        ' + SCREEN,
        "screening_leaves_the_stream_as_it_is",
    ),
    "a state that goes on": (
        STATE,
        STATE.replace("list(self._returned)", "self._returned"),
        "a_state_stays_what_it_was",
    ),
}

TRACKER = """
from slime_core import Component, hookimpl

@hookimpl
def slime_register_trackers():
    yield Component("mine", target=f"{__name__}:Lines")

class Lines:
    def __init__(self, options, run):
        self.file = open("lines.txt", "a")

    def start(self, run):
        self.run = run

    def log(self, step, metrics):
        self.file.write(f"{step} {dict(metrics)}\\n")

    def close(self, error):
        self.file.close()
"""
WRITTEN = 'self.file.write(f"{step} {dict(metrics)}\\n")'
TRACKERS = {
    "eats the metrics": (WRITTEN, WRITTEN + "\n        metrics.clear()", "the_metrics_are_not_changed"),
    "refuses a NaN": (
        WRITTEN,
        "import json; json.dumps(metrics, allow_nan=False)",
        "every_metric_is_taken",
        "ValueError",
    ),
    "each step once": (
        WRITTEN,
        "assert step > getattr(self, 'last', -1), 'steps must grow'\n        self.last = step",
        "one_step_can_be_logged_in_parts",
        "AssertionError",
    ),
    "only forward": (
        WRITTEN,
        "assert step >= getattr(self, 'last', -1), 'steps must grow'\n        self.last = step",
        "a_resumed_run_logs_an_earlier_step",
        "AssertionError",
    ),
    "closes what was never opened": (
        'self.file = open("lines.txt", "a")',
        "self.file = None",
        "it_closes_without_a_step",
        "AttributeError",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_broken_source_is_caught_by_the_property_that_names_it(name, first_party, broken, violation):
    old, new, prop, *error = SOURCES[name]
    source = broken(first_party("slime_core/prompts/numbered.py", SOURCE), old, new)
    violation(DataSourceSuite, source, prop, *error)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_broken_tracker_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = TRACKERS[name]
    violation(TrackerSuite, broken(TRACKER, old, new), prop, *error)


@pytest.mark.parametrize("name", properties(TrackerSuite))
def test_the_right_tracker_holds_every_property(name, suite_of):
    getattr(suite_of(TrackerSuite, TRACKER)(), name)()
