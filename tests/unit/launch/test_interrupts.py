"""A run that is being taken down is not broken off by the impatient, unless they insist."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime_core.launch.interrupts import ENDING, Interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_before_the_end_begins_is_let_through() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_and_says_so(
    number: signal.Signals, handlers: dict[int, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(number)
        done = True
    assert done
    assert capfd.readouterr().err == ENDING.decode()
    assert {one: signal.getsignal(one) for one in handlers} == handlers


def test_the_second_one_ends_at_once() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        done = True
    assert not done


def test_what_failed_is_told_and_not_the_signal() -> None:
    with pytest.raises(ValueError, match="its own"), Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        raise ValueError("its own")


def test_in_another_thread_nothing_is_held_and_nothing_fails(handlers: dict[int, Any]) -> None:
    def held() -> Any:
        with Interrupts() as interrupts:
            interrupts.hold()
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(held).result() is handlers[signal.SIGINT]
