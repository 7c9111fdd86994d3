"""What a long wait reports: a line while it moves, stacks only when nothing does or when the user asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from slime_core.config.schema import WatchConfig
from slime_core.errors import WaitTimeout
from slime_core.runtime import waiting
from slime_core.runtime.actors import Call
from slime_core.runtime.progress import Progress
from slime_core.runtime.waiting import RunWait, stacks_on_request

STACKS = "process 7\nthread main:\n  File worker.py, line 3"


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.progress: Progress | None = None

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "_collect_stacks", lambda pending: {call.who: STACKS for call in pending})
    monkeypatch.setattr(waiting, "_collect_progress", lambda pending: clock.progress)
    yield clock
    waiting._stacks_requested.clear()


class Reports:
    """The reports of one wait, which looks every half second until ``until_s``."""

    def __init__(self, clock: Clock, *, fail_after_s: float = 1800.0, names: tuple[str, ...] = ("sampler",)) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._clock = clock
        self._calls: list[Call[Any]] = [Call(None, name, "sample") for name in names]  # type: ignore[arg-type]
        self._watch = waiting._Watch(
            what="rollout 3",
            warn_after_s=60.0,
            fail_after_s=fail_after_s,
            on_warn=self.warnings.append,
            on_progress=self.notes.append,
        )

    def look(self, until_s: float, *, groups_a_minute: int = 0) -> None:
        while self._clock.now_s < until_s:
            self._clock.now_s += 0.5
            if groups_a_minute:
                done = int(self._clock.now_s / 60 * groups_a_minute)
                self._clock.progress = Progress(done, 32, "groups", {"engines": 40, "rewards": 3})
            self._watch.look(self._calls, finished=0)


def test_a_rollout_that_moves_is_one_line_a_report_and_never_shows_stacks(clock: Clock) -> None:
    reports = Reports(clock)
    reports.look(until_s=1500, groups_a_minute=1)
    assert reports.warnings == []
    assert 4 <= len(reports.notes) <= 6
    assert [line for line in reports.notes if "\n" in line] == []
    first = reports.notes[0]
    assert all(part in first for part in ("rollout 3", "60 s", "1 of 32 groups", "engines (40)", "rewards (3)"))
    assert "about 1860 s left" in first


def test_a_rollout_in_which_nothing_moves_shows_stacks_after_half_of_its_limit(clock: Clock) -> None:
    reports = Reports(clock)
    clock.progress = Progress(0, 32, "groups")
    reports.look(until_s=899)
    assert len(reports.warnings) == 4
    assert not any("\n" in line for line in reports.warnings)
    reports.look(until_s=1799)
    assert any("line 3" in line for line in reports.warnings)
    with pytest.raises(WaitTimeout) as caught:
        reports.look(until_s=1801)
    assert "line 3" in str(caught.value)


def test_a_rollout_that_stops_moving_shows_stacks_later(clock: Clock) -> None:
    reports = Reports(clock, fail_after_s=7200)
    reports.look(until_s=600, groups_a_minute=1)
    noted = len(reports.notes)
    reports.look(until_s=5000)
    assert len(reports.notes) <= noted + 1  # what the last report before had not seen
    assert any("line 3" in line for line in reports.warnings)


def test_a_hundred_pending_processes_are_one_line(clock: Clock) -> None:
    reports = Reports(clock, names=tuple(f"learner rank {rank}" for rank in range(100)))
    reports.look(until_s=61)
    (line,) = reports.warnings
    assert "\n" not in line
    assert "94 more" in line
    assert len(line) < 300


def test_sigusr1_shows_stacks_once_and_its_handler_goes_with_the_block(clock: Clock) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    reports = Reports(clock)
    with stacks_on_request():
        os.kill(os.getpid(), signal.SIGUSR1)
        reports.look(until_s=5)
    assert [line.count("line 3") for line in reports.warnings] == [1]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("done", "left"), [(0, ""), (8, "about 180 s left"), (32, "")], ids=["none is done", "a quarter", "all"]
)
def test_the_time_left_is_told_once_something_is_done(clock: Clock, done: int, left: str) -> None:
    reports = Reports(clock)
    clock.progress = Progress(done, 32, "groups")
    reports.look(until_s=60)
    (line,) = reports.notes or reports.warnings
    assert ("left" in line) is bool(left)
    assert left in line


@pytest.mark.parametrize(("at_least_s", "limit_s"), [(0.0, 1800.0), (3000.0, 3000.0)])
def test_calls_with_longer_limits_of_their_own_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, at_least_s: float, limit_s: float
) -> None:
    limits: list[float] = []

    def wait(calls: Any, *, fail_after_s: float, **_: Any) -> list[Any]:
        limits.append(fail_after_s)
        return list(calls)

    monkeypatch.setattr(waiting, "wait", wait)
    RunWait(WatchConfig(wait_fail_s=1800), print)([], what="engines to start", at_least_s=at_least_s)
    assert limits == [limit_s]
