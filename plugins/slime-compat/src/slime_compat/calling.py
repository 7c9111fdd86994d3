"""Imports a function named by path, checks its signature, and calls it; every failure names its flag."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from slime_compat.check import accepted, ambiguous, refusal, text_of
from slime_compat.keyed import carry_key
from slime_compat.names import in_use, provided
from slime_compat.signatures import Form, choose, defined, first_fit
from slime_core import boundary
from slime_core.errors import PluginError, SlimeError
from slime_core.provisional import FunctionSource, load_function, own_definitions
from slime_core.services import refused_key

__all__ = ["PathFunction", "call_async", "loaded", "scalar"]

THREADS = 128
"""Limit on concurrent plain functions of one event loop; each thread reserves 8 MiB of a reward worker's limit."""

_ROOM: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PathFunction:
    """An imported function with an accepted signature; prints as the flag that names it.

    Arguments:
        function: the function or class.
        form: the first accepted form that it has.
        offered: the optional arguments of the form that it takes by name.
        source: the place of its code.
    """

    function: Any
    form: Form
    offered: frozenset[str]
    source: FunctionSource

    def __str__(self) -> str:
        return str(self.source)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function in this thread, and return its result."""
        with self.blamed():
            return self.function(*arguments, **named)

    @contextmanager
    def blamed(self, action: str = "calling it") -> Iterator[None]:
        """Raise exceptions of user code as a ``PluginError`` that names the flag; slime's errors pass unchanged."""
        with boundary(self.source, action, locate=True, next_step=refused_key, passes=(SlimeError,)), in_use():
            yield

    def named(self, **values: Any) -> dict[str, Any]:
        """Return the entries of ``values`` that are parameters of the function."""
        return {name: value for name, value in values.items() if name in self.offered}

    def refused(self, returned: Any, accepts: str) -> PluginError:
        """Return the error for a value that the function may not return."""
        return PluginError(f"{self}: it returned {returned!r:.80}; accepted: {accepts}.")


def scalar(value: Any) -> Any:
    """Return the number in an array or tensor without axes; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def loaded(source: FunctionSource, forms: Sequence[Form]) -> PathFunction:
    """Import the function and check its signature.

    Raises:
        PluginError: it cannot be imported, or its signature is not accepted.
    """
    with provided(source):
        function = _chosen(source, forms) if source.attribute is None else load_function(source)
    carry_key(text_of(source))
    if not callable(function):
        raise PluginError(f"{source}: this is a {type(function).__name__}; {accepted(forms)}.")
    with boundary(source, "reading its signature"):
        definition = defined(function)
    form = first_fit(definition, forms)
    if form is None:
        raise refusal(source, definition, forms)
    parameters = definition.signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    offered = frozenset(name for name in form.offered if takes_all or name in parameters)
    return PathFunction(function, form, offered, source)


def _chosen(source: FunctionSource, forms: Sequence[Form]) -> Any:
    values = own_definitions(source)
    candidates = {name: defined(value) for name, value in values.items()}
    names = choose(candidates, forms)
    if len(names) != 1:
        raise ambiguous(source, candidates, names, forms)
    return values[names[0]]


async def call_async(path: PathFunction, *arguments: Any, function: Any = None, **named: Any) -> Any:
    """Await an async function, call any other in a thread, and return the result.

    Arguments:
        function: called instead of ``path.function``, such as a method of an object that it created.
    """
    called = path.function if function is None else function
    with path.blamed():
        if inspect.iscoroutinefunction(inspect.unwrap(called)):
            return await called(*arguments, **named)
        result = await _in_thread(path, lambda: called(*arguments, **named))
        return await result if inspect.isawaitable(result) else result


async def _in_thread(path: PathFunction, function: Callable[[], Any]) -> Any:
    """Call the function in a new thread, and return its result.

    A function that is abandoned, as by a time limit, may run forever; it occupies no thread of later calls.
    """

    def run() -> Any:
        # Inside the thread, because a StopIteration cannot be raised into a future.
        with path.blamed():
            return function()

    async with _ROOM.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS)):
        thread = ThreadPoolExecutor(1, thread_name_prefix="function")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, run)
        finally:
            thread.shutdown(wait=False)
