"""What the first and the second SIGTERM do."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from slime_core.errors import EngineError, EngineSilent, ProcessDied, ServerDied, SlimeError, WeightSyncError
from slime_core.runtime.waiting import Terminated, Termination


def kill() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_sigterm_waits_for_a_moment_at_which_it_may_come():
    before, done = signal.getsignal(signal.SIGTERM), []
    with Termination() as stop:
        kill()
        done.append("went on")
        with pytest.raises(Terminated), stop.allowed():
            done.append("not reached")
    assert done == ["went on"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_it_is_allowed_it_comes_at_once_and_only_there():
    with Termination() as stop:
        with stop.allowed():
            pass
        with pytest.raises(Terminated), stop.allowed():
            kill()


def interrupted_as_by_ray(times: int) -> None:
    """Ray catches the errors of signal handlers in its waits, and raises a KeyboardInterrupt of its own."""
    for _ in range(times):
        with suppress(KeyboardInterrupt):
            kill()
    raise KeyboardInterrupt


def test_a_bare_interrupt_stands_for_the_first_sigterm_and_not_for_the_second():
    with Termination() as stop, pytest.raises(Terminated), stop.allowed():
        interrupted_as_by_ray(1)
    with Termination() as stop, pytest.raises(KeyboardInterrupt) as ended, stop.allowed():
        interrupted_as_by_ray(2)
    assert ended.type is KeyboardInterrupt


def test_the_second_sigterm_ends_what_the_first_waits_for():
    with Termination():
        kill()
        with pytest.raises(KeyboardInterrupt) as ended:
            kill()
    assert ended.type is KeyboardInterrupt


def dies_after_a_sigterm(error: type[SlimeError]) -> None:
    with Termination():
        kill()
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
):
    with pytest.raises(raised):
        dies_after_a_sigterm(error)


def test_a_death_without_a_sigterm_stays_what_it_is():
    with pytest.raises(ProcessDied), Termination():
        raise ProcessDied("sampler died")


def test_outside_the_main_thread_signals_stay_as_they_are():
    handlers = []

    def other() -> None:
        with Termination() as stop, stop.allowed():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
