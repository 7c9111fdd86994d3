"""The suite of trackers: accept every metric, change none, and can be closed at any time."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st

from slime_core import RunView, SampleRecord, boundary
from slime_core.errors import PluginError, RunError
from slime_core.provisional import SampleTracker
from slime_testing.harness import Kind
from slime_testing.suite import ComponentSuite, PropertyViolation, given, require

__all__ = ["TrackerSuite"]

NAMES = ("train/loss", "rollout/raw_reward", "eval/prompts-truncated_ratio", "eval/prompts/carries=1", "perf/step_s")
VALUES = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, math.nan, math.inf, 1e-300]))
metrics = st.dictionaries(st.sampled_from(NAMES), VALUES)

SAMPLES = [
    SampleRecord(0, 0, "1+1=", "2", "2", 1.0, "completed", 2, ("1",)),
    SampleRecord(
        0, 1, [{"role": "user", "content": "1+1="}], "", None, None, "failed", 0, cause="timeout", error="late"
    ),
]
"""Records with each type of prompt, with and without label and reward."""


class TrackerSuite(ComponentSuite):
    """For trackers; each example runs in an empty working folder."""

    kind: ClassVar[Kind] = Kind.TRACKER

    @given(max_examples=15, steps=st.lists(metrics, min_size=1, max_size=4))
    def test_every_metric_is_taken(self, steps: list[dict[str, float]]) -> None:
        with self._tracker() as tracker:
            for step, metrics in enumerate(steps):
                tracker.log(step, metrics)

    @given(max_examples=15, metrics=metrics)
    def test_the_metrics_are_not_changed(self, metrics: dict[str, float]) -> None:
        before = dict(metrics)
        with self._tracker() as tracker:
            tracker.log(0, metrics)
        same = list(metrics) == list(before) and all(repr(metrics[name]) == repr(before[name]) for name in before)
        require(same, f"log() changed the metrics from {before} to {metrics}; other trackers see the same ones")

    def test_one_step_can_be_logged_in_parts(self) -> None:
        with self._tracker() as tracker:
            tracker.log(3, {"train/loss": 0.5})
            tracker.log(3, {"eval/prompts": 0.25})

    def test_a_resumed_run_logs_an_earlier_step(self) -> None:
        with self._tracker() as tracker:
            tracker.log(9, {"train/loss": 0.5})
            tracker.log(4, {"train/loss": 0.25})

    def test_it_closes_without_a_step(self) -> None:
        with self._tracker():
            pass

    def test_it_closes_after_a_failure_of_the_run(self) -> None:
        with self._tracker(RunError("an engine died")) as tracker:
            tracker.log(0, {"train/loss": 0.5})

    def test_samples_are_taken_where_it_sees_them(self) -> None:
        with self._tracker() as tracker:
            tracker.log(0, {"train/loss": 0.5})
            tracker.samples("train", 0, SAMPLES)
            tracker.samples("train", 1, [])
            tracker.samples("eval", 1, [replace(SAMPLES[0], eval_set="sums", reward={"score": 1.0})])

    @contextmanager
    def _tracker(self, error: BaseException | None = None) -> Iterator[_Tried]:
        """Yield a tracker that is closed after the block, even if the block raises."""
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                tracker = _Tried(self.make())
                try:
                    tracker.start(RunView(folder=Path(folder)))
                    yield tracker
                finally:
                    tracker.close(error)
            finally:
                os.chdir(before)


class _Tried:
    """Wraps a tracker; failures name the call that raised."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._called(f"log({step}, {metrics})", lambda: self.tracker.log(step, metrics))

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Sequence[SampleRecord]) -> None:
        if isinstance(self.tracker, SampleTracker):
            self._called(f"samples({kind!r}, {step}, ...)", lambda: self.tracker.samples(kind, step, iter(rows)))

    def start(self, run: RunView) -> None:
        self._called("start(run)", lambda: self.tracker.start(run))

    def close(self, error: BaseException | None) -> None:
        self._called(f"close({error!r})", lambda: self.tracker.close(error))

    def _called(self, what: str, run: Callable[[], Any]) -> None:
        try:
            with boundary("the tracker", what):
                run()
        except PluginError as failure:
            raise PropertyViolation(str(failure)) from failure.__cause__
