"""The metrics of a run: rows, timers, trackers and listeners. The driver opens a :class:`Track`; the loop writes to it.

    with Track(record) as track:
        track.evaluation(0, sampler.evaluate())
        for step in range(n):
            with track.step(step) as metrics:
                with track.timer("rollout"):
                    shards = sampler.sample(step)
                ...
                metrics.update(learner.train(shards))
            track.evaluation(step + 1, sampler.evaluate())

``track.evaluation`` may also be called inside the step: its row depends on the version (see the package's docstring),
not on the place of the call.

Listeners receive events, which are frozen records: ``StepFinished(step=3, metrics={"train/loss": 0.1})``. Trackers and
displays do not end a run: :class:`Observer` counts their failures and leaves them out after three. A tracker that
cannot start is left out at once.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Literal, ParamSpec

from slime_core.contracts import RunView, SampleTracker, Tracker
from slime_core.errors import NonFiniteError
from slime_core.track.record import RunRecord, checkpoint_of
from slime_core.track.samples import read_samples
from slime_core.track.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """``phase`` ("rollout", "train") starts; ``step`` is None outside the steps."""

    phase: str
    step: int | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """Step ``step`` has ended and its row is on disk."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvalFinished:
    """The weights of ``version`` were evaluated."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for the user, in full sentences."""

    message: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the user about something that goes well and takes long."""

    message: str


Event = PhaseStarted | StepFinished | EvalFinished | Warned | Noted
Listener = Callable[[Event], None]


P = ParamSpec("P")

MAX_FAILURES = 3
"""Failures after which an observer is not called any more: a server may be unreachable for a moment, a bug stays."""


class Observer:
    """Something that may fail, such as a tracker; ``on_give_up`` is called once, after the third failure, or after a
    failure of :meth:`start`.

    Example: ``observer.call(tracker.log, step, metrics)``. Exceptions are caught; Ctrl-C and exits are not.
    """

    def __init__(self, name: str, *, on_give_up: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        self._on_give_up = on_give_up

    def call(self, method: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``method``, unless three calls have failed."""
        if self.failures == MAX_FAILURES:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:
            self.failures += 1
            if self.failures == MAX_FAILURES:
                self._give_up(f"failed {MAX_FAILURES} times", error)

    def start(self, method: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``method``, without which nothing else works: its failure is the last one."""
        try:
            method(*args, **kwargs)
        except Exception as error:
            self.failures = MAX_FAILURES
            self._give_up("could not start", error)

    def _give_up(self, reason: str, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        self._on_give_up(
            f"{self.name} {reason} and is off for the rest of the run: "
            f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}). "
            "The run continues; metrics.jsonl is complete."
        )


class Metrics(UserDict[str, float]):
    """The metrics of one step: names and finite numbers, in insertion order; a name can be set once.

    Example::

        >>> metrics = Metrics({"train/loss": 0.5})
        >>> metrics["rollout/raw_reward"] = 1
        >>> dict(metrics)
        {'train/loss': 0.5, 'rollout/raw_reward': 1.0}

    Raises:
        ValueError: a name is set twice, by two places that would overwrite each other.
        TypeError: a value is not a real number (a tensor, a string).
        NonFiniteError: a value is NaN or infinite.
    """

    def __setitem__(self, name: str, value: float) -> None:
        if name in self:
            raise ValueError(f"Metric {name!r} is already {self[name]} in this step; name the second differently.")
        self.data[name] = _finite(name, value)

    def add(self, name: str, amount: float) -> None:
        """Add ``amount`` to the value of ``name``, or to 0: for times and counts that are measured in parts."""
        self.data[name] = self.data.get(name, 0.0) + _finite(name, amount)


def _finite(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"Metric {name!r} is a {type(value).__name__}; give a number (a tensor's .item()).")
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(
            f"Metric {name!r} is {number}. Nothing computed from it may be trained on or published; "
            "look at the samples and the gradient norm of the step before."
        )
    return number


class Track:
    """The metrics logger of a run: writes a row per step to ``metrics.jsonl`` and to trackers, and sends events to
    listeners.

    ``metrics.jsonl`` is the record: failing to write it ends the run. Trackers and listeners only observe: after three
    failures such an observer is off for the rest of the run, and one :class:`Warned` reports it.

    Arguments:
        record: the run folder.
        trackers: by name.
        run: the view of the run with which trackers are started.
        listeners: called with every event, in the driver's thread.

    Attributes:
        num_steps: steps of the run that have a row; 0 before the first step of this process.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        trackers: Mapping[str, Tracker] | None = None,
        run: RunView | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.record = record
        self._run = run or RunView(folder=record.directory)
        record.metrics.touch()
        self._timeline = Timeline(record.directory, "driver")
        self._listeners = [(listener, self._observer(f"Listener {listener!r}")) for listener in listeners]
        self._trackers = [(tracker, self._observer(f"Tracker {name!r}")) for name, tracker in (trackers or {}).items()]
        self._step: int | None = None
        self._metrics = Metrics()
        self._last_row = -1
        self.num_steps = 0
        self._evaluations: dict[int, dict[str, float]] = {}
        if record.resumed_step is not None and record.pending_evaluation:
            self._evaluations[record.resumed_step] = dict(record.pending_evaluation)

    def __enter__(self) -> Track:
        for tracker, observer in self._trackers:
            observer.start(tracker.start, self._run)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    @contextmanager
    def step(self, step: int) -> Iterator[Metrics]:
        """Collect the metrics of ``step`` in the block, and write its row at the end. If the block fails, the row is
        written only if a checkpoint holds the step, because then no resume repeats the step."""
        assert self._step is None, f"step {step} starts inside step {self._step}"
        self._flush_evaluations(before=step)
        self._step, self._metrics = step, Metrics()
        started_s, is_whole = time.monotonic(), False
        try:
            yield self._metrics
            self._metrics["perf/step_time"] = time.monotonic() - started_s
            is_whole = True
        finally:
            self._step = None
            if is_whole or checkpoint_of(self.record.checkpoints, step + 1).exists():
                self._metrics.update(self._evaluations.pop(step, {}))
                self._write(step, dict(self._metrics))
        self.num_steps = step + 1
        self._pass_samples("train", step)
        self.emit(StepFinished(step, dict(self._metrics)))

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Send :class:`PhaseStarted` and add the seconds of the block to ``perf/<phase>_time`` of the current step."""
        self.emit(PhaseStarted(phase, self._step))
        started_s = time.monotonic()
        yield
        seconds = time.monotonic() - started_s
        self._timeline.ended(phase, self._step, seconds)
        if self._step is not None:
            self._metrics.add(f"perf/{phase}_time", seconds)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation of the weights of ``version`` to row ``version``; the last one counts.

        If the row is already written, because training continued meanwhile, the evaluation is added to it.

        Arguments:
            metrics: names with ``eval/`` in front.
        """
        checked = dict(Metrics(metrics))
        if version > self._last_row:
            self._evaluations[version] = checked
        else:
            self.record.add_to_row(version, checked)
            self._log(version, checked)
        self._pass_samples("eval", version)
        self.emit(EvalFinished(version, checked))

    def warn(self, message: str) -> None:
        """Emit a warning to the listeners."""
        self.emit(Warned(message))

    def note(self, message: str) -> None:
        """Emit a line about something that takes long."""
        self.emit(Noted(message))

    def emit(self, event: Event) -> None:
        """Call every listener with ``event``, except those that have failed too often."""
        for listener, observer in self._listeners:
            observer.call(listener, event)

    def close(self, error: BaseException | None = None) -> None:
        """Write pending evaluations as separate rows, and close all trackers with ``error``."""
        if self.record.has_begun:
            self._flush_evaluations(before=None)
        for tracker, observer in self._trackers:
            self._observer(observer.name).call(tracker.close, error)  # one that is off is closed too

    def _flush_evaluations(self, *, before: int | None) -> None:
        for version in sorted(self._evaluations):
            if before is None or version < before:
                self._write(version, self._evaluations.pop(version))

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        assert step > self._last_row, f"row {step} comes after row {self._last_row}; steps rise"
        self._last_row = step
        self.record.add_row(step, metrics)
        self._log(step, metrics)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker, observer in self._trackers:
            observer.call(tracker.log, step, dict(metrics))

    def _pass_samples(self, kind: Literal["train", "eval"], step: int) -> None:
        for tracker, observer in self._trackers:
            if isinstance(tracker, SampleTracker):
                observer.call(tracker.samples, kind, step, read_samples(self.record.samples, kind, step))

    def _observer(self, name: str) -> Observer:
        return Observer(name, on_give_up=self.warn)
