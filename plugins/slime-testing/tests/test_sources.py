"""A data source and a tracker, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_testing import DataSourceSuite, TrackerSuite

STATE = 'return {"next": self._next, "returned": list(self._returned)}'
RESTORED = 'self._next, self._returned = state["next"], list(state["returned"])'
SCREEN = "return []"
SOURCE = f"""
import itertools, json, random
from slime_core import Sample

SEEDS = itertools.count()

class Rows:
    def __init__(self, run):
        self._request = run.prompts
        self._rows = [json.loads(line) for line in run.prompts.path.read_text().splitlines()]
        random.Random(run.prompts.seed).shuffle(self._rows)
        self._next, self._returned = 0, []

    @classmethod
    def screen(cls, options, run, screen):
        {SCREEN}

    def __len__(self):
        return len(self._rows)

    def next_groups(self, n):
        returned, self._returned = self._returned[:n], self._returned[n:]
        fresh = range(self._next, self._next + n - len(returned))
        self._next = fresh.stop
        return [self._group(number) for number in [*returned, *fresh]]

    def _group(self, number):
        row, size = self._rows[number % len(self._rows)], self._request.n_samples_per_prompt
        texts = {{"prompt": row["prompt"], "label": row["label"]}}
        return [Sample(group_index=number, index=number * size + i, **texts) for i in range(size)]

    def put_back(self, groups):
        self._returned.extend(group[0].group_index for group in groups)

    def state(self):
        {STATE}

    def restore(self, state):
        {RESTORED}
"""
ADDED = 'data_source("mine", Rows)'
NUMBERS = "samples_are_pending_and_distinguished_by_their_numbers"
SOURCES = {
    "does not resume": (RESTORED, 'self._returned = list(state["returned"])', "it_resumes_the_same_stream"),
    "resumes a group too early": (RESTORED, RESTORED.replace('["next"]', '["next"] + 1'), "it_resumes_the_same_stream"),
    "a state that JSON cannot hold": (STATE, STATE.replace("list(", "set("), "it_resumes_the_same_stream"),
    "another seed each time": ("Random(run.prompts.seed)", "Random(next(SEEDS))", "reading_the_state_changes_nothing"),
    "loses groups": (
        "self._returned.extend(group[0].group_index for group in groups)",
        "pass",
        "what_was_put_back_comes_first",
    ),
    "returns them last": (
        "self._returned[:n], self._returned[n:]",
        "self._returned[n:], self._returned[:n]",
        "what_was_put_back_comes_first",
    ),
    "forgets them in the state": ("list(self._returned)", "[]", "what_was_put_back_survives_a_restart"),
    "groups of one": ("for i in range(size)", "for i in range(1)", "groups_have_the_requested_size"),
    "too few groups": ("[*returned, *fresh]]", "[*returned, *fresh]][:2]", "groups_have_the_requested_size"),
    "one index for a group": ("number * size + i", "number", NUMBERS),
    "numbers of an epoch": ("group_index=number", "group_index=number % 7", NUMBERS),
    "changes the file": (
        SCREEN,
        f'run.prompts.path.write_text(\'{{"prompt": "a", "label": "b"}}\\n\')\n        {SCREEN}',
        "screening_leaves_the_stream_as_it_is",
    ),
    "a state that changes": ("list(self._returned)}", "self._returned}", "a_state_stays_what_it_was"),
}

WRITTEN = 'self.file.write(f"{step} {dict(metrics)}\\n")'
TRACKER = f"""
class Lines:
    def __init__(self):
        self.file = open("lines.txt", "a")

    def start(self, run):
        self.run = run

    def log(self, step, metrics):
        {WRITTEN}

    def close(self, error):
        self.file.close()
"""
LINES = 'tracker("mine", Lines)'
FORWARD = "assert step {} getattr(self, 'last', -1)\n        self.last = step"
TRACKERS = {
    "clears the metrics": (WRITTEN, "metrics.clear()", "the_metrics_are_not_changed"),
    "refuses a NaN": (
        WRITTEN,
        "import json; json.dumps(metrics, allow_nan=False)",
        "every_metric_is_taken",
        "ValueError",
    ),
    "each step once": (WRITTEN, FORWARD.format(">"), "one_step_can_be_logged_in_parts", "AssertionError"),
    "only forward": (WRITTEN, FORWARD.format(">="), "a_resumed_run_logs_an_earlier_step", "AssertionError"),
    "closes an unopened file": ('open("lines.txt", "a")', "None", "it_closes_without_a_step", "AttributeError"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_broken_source_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(DataSourceSuite, SOURCE, ADDED, SOURCES[name])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_broken_tracker_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(TrackerSuite, TRACKER, LINES, TRACKERS[name])


def test_right_ones_hold_every_property(holds: Callable[..., None]) -> None:
    holds(DataSourceSuite, SOURCE, ADDED)
    holds(TrackerSuite, TRACKER, LINES)
