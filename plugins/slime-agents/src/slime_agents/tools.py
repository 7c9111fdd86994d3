"""Functions that a model may call.

Tool      one function: description for the chat template, validation of arguments, answer as text
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

__all__ = ["Tool", "ToolCall", "ToolError", "Toolbox", "no_tool", "unreadable"]


THREADS = 256
"""Limit on concurrent calls of tools that are plain functions; any others wait for a thread."""


class ToolError(Exception):
    """Raised by a tool to report a failed call to the model; the conversation continues with its message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a turn of the model.

    Arguments:
        name: name of the tool.
        arguments: JSON text of an object, as the model wrote it.
    """

    name: str
    arguments: str


class Tool:
    """A function with typed arguments; an async function is awaited, any other runs in a thread.

    Example; the first paragraph of the docstring is the tool's description::

        async def add(a: int, b: int) -> int:
            \"\"\"The sum of two numbers.\"\"\"
            return a + b

    Raises:
        PluginError: the object is not a function, or the type of an argument has no JSON schema.
    """

    def __init__(self, function: object) -> None:
        if not callable(function) or not getattr(function, "__name__", ""):
            raise PluginError(f"a tool is a function with typed arguments; found {function!r}")
        self.name = str(getattr(function, "__name__", ""))
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
            schema = adapter.json_schema()
            self._checked: Callable[..., Any] = validate_call(function)
        except Exception as problem:  # pydantic raises several types
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
        """Call the function; return text unchanged and anything else as JSON.

        Raises:
            ToolError: the arguments are invalid, or the tool raised it.
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
    # An own pool: tools that hang would use up asyncio's default pool, which has few threads and is shared.
    return ThreadPoolExecutor(THREADS, thread_name_prefix="tool")


def _reasons(problem: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in problem.errors())


class Toolbox:
    """The tools of a run.

    Arguments:
        given: the objects that ``--tools`` names: functions, and lists or tuples of functions.
        max_chars: limit on an answer, in characters; a longer answer is cut, and ends with a note.

    Raises:
        PluginError: an object is not a tool, or two tools have the same name.
    """

    def __init__(self, tools: Sequence[object], *, max_chars: int) -> None:
        self._max_chars = max_chars
        self._tools: dict[str, Tool] = {}
        for entry in tools:
            for function in entry if isinstance(entry, list | tuple) else [entry]:
                tool = Tool(function)
                if tool.name in self._tools:
                    raise PluginError(f"--tools names two tools that are called {tool.name}; rename one")
                self._tools[tool.name] = tool

    @property
    def descriptions(self) -> list[JsonValue]:
        """The descriptions of all tools, in the format of chat templates and of SGLang's tool call parsers."""
        return [tool.description for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        return list(self._tools)

    async def call(self, call: ToolCall) -> str:
        """Return the answer to one call; an invalid call is answered with ``error: ...``.

        Raises:
            Exception: any error that the tool raises, except :class:`ToolError`.
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
            raise ToolError(no_tool(call.name, self.names))
        return tool


def no_tool(name: str, names: Sequence[str]) -> str:
    """Return what the model is told about a call of a tool that does not exist."""
    return f"there is no tool {name!r}; there are: {', '.join(names)}"


def unreadable(count: int, names: Sequence[str]) -> str:
    """Return what the model is told about calls that the parser cannot read."""
    return f"{count} of your tool calls cannot be read; write them in the format of the tools: {', '.join(names)}"


def _object(call: ToolCall) -> Mapping[str, JsonValue]:
    try:
        value: Any = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        raise ToolError(f"the arguments of {call.name} are no JSON") from None
    if not isinstance(value, dict):
        raise ToolError(f"the arguments of {call.name} are no JSON object")
    return value
