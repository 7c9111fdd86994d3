"""Runs coroutines of a component with a time limit, even if they ignore cancellation."""

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
"""Time limit from a cancellation to the end of the task, in seconds; generous, for a busy machine."""

TURNS = (1, 3, 10)
"""Event loop turns before the cancellation."""

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine in a new event loop and return its result."""
    with asyncio.Runner() as runner:
        return runner.run(coroutine)


def require_cancellable(start: Callable[[], Coroutine[Any, Any, Any]], what: str) -> None:
    """Check that the coroutine of ``start`` ends soon after its cancellation, as cancelled.

    Runs in a separate thread; if the coroutine cannot be cancelled, the thread remains until the process ends.

    Raises:
        PropertyViolation: the coroutine blocks the event loop, swallows the cancellation, or exceeds the limit, twice:
            the first time it may be importing modules.
    """
    for turns in TURNS:
        problem = _outcome(start, turns) and _outcome(start, turns)
        require(problem is None, f"{what} {problem}")


def _outcome(start: Callable[[], Coroutine[Any, Any, Any]], turns: int) -> str | None:
    """Cancel once; return a description of the wrong reaction; None if it was right."""
    outcome = Future[str | None]()
    thread = threading.Thread(target=run, args=(_reported(start, turns, outcome),), daemon=True)
    thread.start()
    done, _ = wait([outcome], timeout=3 * LIMIT_S)
    if not done:
        return f"held the event loop for {3 * LIMIT_S:g} s; await, or use asyncio.to_thread"
    problem = outcome.result()
    thread.join(LIMIT_S)
    return problem


async def _reported(start: Callable[[], Coroutine[Any, Any, Any]], turns: int, outcome: Future[str | None]) -> None:
    """Set ``outcome`` before the event loop ends, because the event loop's end waits for tasks that do not end."""
    watching = asyncio.create_task(_cancelled(start, turns))
    await asyncio.wait([watching])
    failure = watching.exception()
    if failure is None:
        outcome.set_result(watching.result())
    else:
        outcome.set_exception(failure)


async def _cancelled(start: Callable[[], Coroutine[Any, Any, Any]], turns: int) -> str | None:
    """Return a description of the wrong reaction to a cancellation; None if it was right, or finished before."""
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
