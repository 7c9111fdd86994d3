"""Calls a function that a path names: awaited if async, in a thread if not; every failure says whose it is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime_core.adapters.check import Loaded
from slime_core.errors import SlimeError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.functions import FunctionSource

__all__ = ["blamed", "call", "call_here"]


@contextmanager
def blamed(source: FunctionSource, action: str = "calling it") -> Iterator[None]:
    """What user code raises comes out as a ``PluginError`` that names the flag; slime's own errors pass."""
    own: SlimeError | None = None
    with boundary(source, action, locate=True):
        try:
            yield
        except SlimeError as error:
            own = error
    if own is not None:
        raise own


async def call(loaded: Loaded, *arguments: Any, function: Any = None, **named: Any) -> Any:
    """What the function returns; the event loop goes on meanwhile.

    Arguments:
        function: called instead of ``loaded.function``, such as a method of what it made.
    """
    called = loaded.function if function is None else function
    with blamed(loaded.source):
        if inspect.iscoroutinefunction(inspect.unwrap(called)):
            return await called(*arguments, **named)
        result = await asyncio.to_thread(called, *arguments, **named)
        return await result if inspect.isawaitable(result) else result


def call_here(loaded: Loaded, *arguments: Any, **named: Any) -> Any:
    """What a plain function returns; nothing else runs meanwhile."""
    with blamed(loaded.source):
        return loaded.function(*arguments, **named)
