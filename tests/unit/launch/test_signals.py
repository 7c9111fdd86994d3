"""Signals to a run: which waits, which ends it, and when."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from slime_core.errors import EngineError, EngineSilent, ProcessDied, ServerDied, SlimeError, WeightSyncError
from slime_core.launch import STOPPING, DelayedInterrupts
from slime_core.runtime.waiting import Terminated, Termination

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (INT, TERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_sigterm_waits_for_a_moment_at_which_it_may_come(handlers: dict[int, Any]) -> None:
    done = []
    with Termination() as stop:
        signal.raise_signal(TERM)
        done.append("went on")
        with pytest.raises(Terminated), stop.allowed():
            done.append("not reached")
    assert done == ["went on"]
    assert signal.getsignal(TERM) is handlers[TERM]
    with Termination() as stop, pytest.raises(Terminated), stop.allowed():
        signal.raise_signal(TERM)


@pytest.mark.parametrize(("times", "raised"), [(1, Terminated), (2, KeyboardInterrupt)])
def test_a_bare_interrupt_stands_for_the_first_sigterm_and_not_for_the_second(
    times: int, raised: type[BaseException]
) -> None:
    def interrupted_as_by_ray() -> None:
        """Ray catches the errors of signal handlers in its waits, and raises a KeyboardInterrupt of its own."""
        for _ in range(times):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(TERM)
        raise KeyboardInterrupt

    with Termination() as stop, pytest.raises(KeyboardInterrupt) as ended, stop.allowed():
        interrupted_as_by_ray()
    assert ended.type is raised


def test_the_second_sigterm_ends_what_the_first_waits_for() -> None:
    with Termination():
        signal.raise_signal(TERM)
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(TERM)
    assert ended.type is KeyboardInterrupt


def dies(error: type[SlimeError], *, after_a_sigterm: bool) -> None:
    with Termination():
        if after_a_sigterm:
            signal.raise_signal(TERM)
        raise error("engine 0 died")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ProcessDied, Terminated),
        (ServerDied, Terminated),
        (EngineSilent, Terminated),
        (EngineError, EngineError),
        (WeightSyncError, WeightSyncError),
    ],
)
def test_a_death_while_a_sigterm_waits_ends_the_run_and_restarts_nothing(
    error: type[SlimeError], raised: type[BaseException]
) -> None:
    with pytest.raises(raised):
        dies(error, after_a_sigterm=True)
    with pytest.raises(error):
        dies(error, after_a_sigterm=False)


def taken_down(*signals: signal.Signals, done: list[str], interrupted: bool = False) -> None:
    """A run that gets signals during its clean-up."""
    with DelayedInterrupts() as interrupts:
        interrupts.delay(interrupted=interrupted)
        for number in signals:
            signal.raise_signal(number)
        done.append("all")


@pytest.mark.parametrize(
    ("signals", "interrupted", "is_delayed"),
    [
        ([INT], False, True),
        ([TERM], False, True),
        ([INT, TERM], False, False),
        ([INT], True, False),
        ([TERM], True, True),
    ],
    ids=["Ctrl-C", "SIGTERM", "the second one", "Ctrl-C after an interrupt", "SIGTERM after an interrupt"],
)
def test_the_first_signal_during_the_clean_up_waits_for_its_end(
    signals: list[signal.Signals],
    interrupted: bool,
    is_delayed: bool,
    handlers: dict[int, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        taken_down(*signals, done=done, interrupted=interrupted)
    assert done == ["all"] * is_delayed
    assert is_delayed is False or capfd.readouterr().err == STOPPING.decode()
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_a_signal_before_the_clean_up_is_let_through() -> None:
    with pytest.raises(KeyboardInterrupt), DelayedInterrupts():
        signal.raise_signal(INT)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("its own"), ValueError), (ProcessDied("sampler died"), KeyboardInterrupt)],
    ids=["a failure is reported rather than the signal", "a death is not restarted"],
)
def test_an_error_beside_a_signal(error: Exception, raised: type[BaseException]) -> None:
    def fails() -> None:
        with DelayedInterrupts() as interrupts:
            interrupts.delay()
            signal.raise_signal(INT)
            raise error

    with pytest.raises(raised):
        fails()
