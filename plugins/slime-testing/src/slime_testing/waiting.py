"""Runs coroutines of a component with a time limit, also where it does not let itself be cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from slime_testing.suite import require

__all__ = ["LIMIT_S", "require_cancellable", "run"]

LIMIT_S = 5.0
"""Seconds from a cancellation to the end of what was cancelled, on a machine with more to do."""

TURNS = (1, 3, 10)
"""Turns of the event loop after which it is cancelled."""

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What the coroutine returns, in an event loop of its own."""
    with asyncio.Runner() as runner:
        return runner.run(coroutine)


def require_cancellable(start: Callable[[], Coroutine[Any, Any, Any]], what: str) -> None:
    """What ``start`` starts ends soon after it is cancelled, and says so.

    Runs in a thread of its own, which a component that cannot be cancelled keeps until the process ends.

    Raises:
        PropertyViolation: it holds the event loop, swallows the cancellation, or outlives the limit; two times, because
            the first one may import what it needs.
    """
    for turns in TURNS:
        found = _outcome(start, turns) and _outcome(start, turns)
        require(found is None, f"{what} {found}")


def _outcome(start: Callable[[], Coroutine[Any, Any, Any]], turns: int) -> str | None:
    """What is wrong with how it reacts to a cancellation; None: nothing."""
    outcome = Future[str | None]()
    thread = threading.Thread(target=run, args=(_reported(start, turns, outcome),), daemon=True)
    thread.start()
    done, _ = wait([outcome], timeout=3 * LIMIT_S)
    if not done:
        return f"held the event loop for {3 * LIMIT_S:g} s; await, or use asyncio.to_thread"
    found = outcome.result()
    thread.join(LIMIT_S)
    return found


async def _reported(start: Callable[[], Coroutine[Any, Any, Any]], turns: int, outcome: Future[str | None]) -> None:
    """Says how it went as soon as it is known: the end of the event loop waits for what does not end."""
    watching = asyncio.create_task(_cancelled(start, turns))
    await asyncio.wait([watching])
    failure = watching.exception()
    if failure is None:
        outcome.set_result(watching.result())
    else:
        outcome.set_exception(failure)


async def _cancelled(start: Callable[[], Coroutine[Any, Any, Any]], turns: int) -> str | None:
    """What is wrong with how it reacts to a cancellation; None: nothing, or it was done before."""
    began_s = time.monotonic()
    task = asyncio.create_task(start())
    for _ in range(turns):
        await asyncio.sleep(0)
    held_s = time.monotonic() - began_s
    if held_s > LIMIT_S:
        return f"held the event loop for {held_s:.1f} s: nothing else could run; await, or use asyncio.to_thread"
    if task.done():
        task.result()
        return None
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=LIMIT_S)
    if not done:
        return f"was still running {LIMIT_S:g} s after it was cancelled; let asyncio.CancelledError through"
    if not task.cancelled():
        return "swallowed its cancellation; let asyncio.CancelledError through"
    return None
