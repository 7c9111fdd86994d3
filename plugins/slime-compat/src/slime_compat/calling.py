"""Calls a function named by path: awaited if async, else in a thread; every failure names its flag."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary

from slime_compat.check import Loaded
from slime_core import boundary
from slime_core.errors import SlimeError
from slime_core.provisional import FunctionSource
from slime_core.services import refused_key

__all__ = ["blamed", "call", "call_here"]

THREADS = 128
"""Limit on concurrent plain functions of one event loop; each thread reserves 8 MiB of a reward worker's limit."""

_ROOM: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@contextmanager
def blamed(source: FunctionSource, action: str = "calling it") -> Iterator[None]:
    """Convert exceptions of user code to a ``PluginError`` that names the flag; slime's own errors pass through."""
    own: SlimeError | None = None
    with boundary(source, action, locate=True, next_step=refused_key):
        try:
            yield
        except SlimeError as error:
            own = error
    if own is not None:
        raise own


async def call(loaded: Loaded, *arguments: Any, function: Any = None, **named: Any) -> Any:
    """Call the function without blocking the event loop, and return its result.

    Arguments:
        function: called instead of ``loaded.function``, such as a method of an object that it created.
    """
    called = loaded.function if function is None else function
    with blamed(loaded.source):
        if inspect.iscoroutinefunction(inspect.unwrap(called)):
            return await called(*arguments, **named)
        result = await _in_thread(loaded.source, lambda: called(*arguments, **named))
        return await result if inspect.isawaitable(result) else result


async def _in_thread(source: FunctionSource, function: Callable[[], Any]) -> Any:
    """Call the function in a new thread, and return its result.

    A function that is abandoned, as by a time limit, may run for ever; it occupies no thread of later calls.
    """

    def run() -> Any:
        # Inside the thread, because a StopIteration cannot be raised into a future.
        with blamed(source):
            return function()

    async with _ROOM.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS)):
        thread = ThreadPoolExecutor(1, thread_name_prefix="function")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, run)
        finally:
            thread.shutdown(wait=False)


def call_here(loaded: Loaded, *arguments: Any, **named: Any) -> Any:
    """Call a plain function in this thread, and return its result; the event loop waits."""
    with blamed(loaded.source):
        return loaded.function(*arguments, **named)
