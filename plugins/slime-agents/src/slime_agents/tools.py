"""Functions that a model may call.

Tool      one function: its description for the chat template, its arguments checked, its answer as text
Toolbox   the tools of a run, by name
ToolCall  a call that the model wrote
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from slime_core.errors import PluginError
from slime_core.types import JsonValue

__all__ = ["Tool", "ToolCall", "ToolError", "Toolbox"]


THREADS = 256
"""Calls of tools that are no coroutines and run at once; further ones wait."""


class ToolError(Exception):
    """What a tool raises to tell the model that a call failed; the conversation goes on with its message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a turn of the model.

    Arguments:
        name: of the tool.
        arguments: as the model wrote them: JSON text of an object.
    """

    name: str
    arguments: str


class Tool:
    """A function with typed arguments, async or not; one that is not runs in a thread.

    Example, whose description is the first paragraph of the docstring::

        async def add(a: int, b: int) -> int:
            \"\"\"The sum of two numbers.\"\"\"
            return a + b

    Raises:
        PluginError: it is no function, or the type of an argument has no JSON schema.
    """

    def __init__(self, function: object) -> None:
        if not callable(function) or not getattr(function, "__name__", ""):
            raise PluginError(f"a tool is a function with typed arguments; found {function!r}")
        self.name = str(getattr(function, "__name__", ""))
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
            schema = adapter.json_schema()
            self._checked: Callable[..., Any] = validate_call(function)
        except Exception as problem:  # of pydantic, which has several
            raise PluginError(f"tool {self.name}: its arguments have no JSON schema: {problem}") from problem
        if schema.get("type") != "object":
            raise PluginError(f"tool {self.name}: a model gives arguments by name; found positional ones")
        self._is_async = inspect.iscoroutinefunction(function)
        text = inspect.getdoc(function) or self.name
        self.description: dict[str, JsonValue] = {
            "type": "function",
            "function": {"name": self.name, "description": text.split("\n\n")[0], "parameters": schema},
        }

    async def __call__(self, arguments: Mapping[str, JsonValue]) -> str:
        """The answer: text as it is, anything else as JSON.

        Raises:
            ToolError: the arguments do not fit, or the tool says so.
        """
        try:
            if self._is_async:
                answer = await self._checked(**arguments)
            else:
                call = partial(self._checked, **arguments)
                answer = await asyncio.get_running_loop().run_in_executor(_threads(), call)
        except ValidationError as problem:
            raise ToolError(f"{self.name}: {_reasons(problem)}") from problem
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


@cache
def _threads() -> ThreadPoolExecutor:
    # asyncio's own pool has a few threads, which tools that hang would take from all others of the process.
    return ThreadPoolExecutor(THREADS, thread_name_prefix="tool")


def _reasons(problem: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problem.errors())


class Toolbox:
    """The tools of a run.

    Arguments:
        given: what ``--tools`` names: functions, and lists or tuples of them.
        max_chars: characters of an answer that the model gets; the rest is left out, and the answer says so.

    Raises:
        PluginError: one is no tool, or two have the same name.
    """

    def __init__(self, given: Sequence[object], *, max_chars: int) -> None:
        self._max_chars = max_chars
        self._tools: dict[str, Tool] = {}
        for one in given:
            for function in one if isinstance(one, list | tuple) else [one]:
                tool = Tool(function)
                if tool.name in self._tools:
                    raise PluginError(f"--tools names two tools that are called {tool.name}; rename one")
                self._tools[tool.name] = tool

    @property
    def descriptions(self) -> list[JsonValue]:
        """The descriptions of all tools, in the form of chat templates and parsers of tool calls."""
        return [tool.description for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> str:
        """The answer to one call; a mistake in the call itself is the answer to the model, as ``error: ...``.

        Raises:
            Exception: whatever the tool raises, except :class:`ToolError`.
        """
        try:
            answer = await self._of(call)(_object(call))
        except ToolError as problem:
            answer = f"error: {problem}"
        left_out = len(answer) - self._max_chars
        return answer if left_out <= 0 else f"{answer[: self._max_chars]}\n[{left_out} characters left out]"

    def _of(self, call: ToolCall) -> Tool:
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        return tool


def _object(call: ToolCall) -> Mapping[str, JsonValue]:
    try:
        found: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        raise ToolError(f"the arguments of {call.name} are no JSON") from None
    if not isinstance(found, dict):
        raise ToolError(f"the arguments of {call.name} are no JSON object")
    return found
