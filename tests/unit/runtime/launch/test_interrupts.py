"""A signal during the clean-up of a run waits for its end, unless it is the second one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime_core.errors import ProcessDied
from slime_core.runtime.launch import STOPPING, DelayedInterrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_before_the_end_starts_is_let_through() -> None:
    with pytest.raises(KeyboardInterrupt), DelayedInterrupts():
        signal.raise_signal(signal.SIGINT)


def taken_down(*signals: signal.Signals, done: list[str]) -> None:
    """A run that gets a signal during its clean-up."""
    with DelayedInterrupts() as interrupts:
        interrupts.delay()
        for number in signals:
            signal.raise_signal(number)
        done.append("all")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_and_says_so(
    number: signal.Signals, handlers: dict[int, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        taken_down(number, done=done)
    assert done == ["all"]
    assert capfd.readouterr().err == STOPPING.decode()
    assert {one: signal.getsignal(one) for one in handlers} == handlers


def test_the_second_one_ends_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        taken_down(signal.SIGINT, signal.SIGTERM, done=done)
    assert done == []


@pytest.mark.parametrize(("number", "is_delayed"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_after_an_interrupt_ctrl_c_is_the_second_signal_and_sigterm_is_not(
    number: signal.Signals, is_delayed: bool
) -> None:
    done: list[str] = []

    def interrupted() -> None:
        with DelayedInterrupts() as interrupts:
            interrupts.delay(interrupted=True)
            signal.raise_signal(number)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["all"] * is_delayed


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done: list[str] = []
    taken_down(signal.SIGINT, signal.SIGINT, done=done)
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def fails(error: Exception) -> None:
    with DelayedInterrupts() as interrupts:
        interrupts.delay()
        signal.raise_signal(signal.SIGINT)
        raise error


def test_a_failure_is_reported_rather_than_the_signal() -> None:
    with pytest.raises(ValueError, match="its own"):
        fails(ValueError("its own"))


def test_a_signal_during_the_clean_up_after_a_death_prevents_the_restart() -> None:
    with pytest.raises(KeyboardInterrupt):
        fails(ProcessDied("sampler died"))


def test_in_another_thread_signals_are_not_delayed(handlers: dict[int, Any]) -> None:
    def held() -> Any:
        with DelayedInterrupts() as interrupts:
            interrupts.delay()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(held).result() is handlers[signal.SIGINT]
