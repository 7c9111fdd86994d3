"""Runs coroutines of a component with a time limit, also where it does not let itself be cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slime_core.testing.suite import require

__all__ = ["LIMIT_S", "require_cancellable", "run"]

LIMIT_S = 2.0
"""Seconds from a cancellation to the end of what was cancelled."""

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
        PropertyViolation: it holds the event loop, swallows the cancellation, or outlives the limit.
    """
    for turns in TURNS:
        outcome: list[str | None] = []
        thread = threading.Thread(target=lambda: outcome.append(run(_cancelled(start, turns))), daemon=True)  # noqa: B023
        thread.start()
        thread.join(3 * LIMIT_S)
        stuck = f"{what} went on for {3 * LIMIT_S:g} s after it was cancelled, or held the event loop that long"
        require(bool(outcome), stuck)
        require(outcome[0] is None, f"{what} {outcome[0]}")


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
