"""Finds tool calls in a turn of the model with the engine's own parsers (``POST /parse_function_call``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_agents.formats import FORMATS, opened_thoughts, split_thoughts
from slime_agents.tools import ToolCall
from slime_core.errors import EngineError, PluginError, ServiceError
from slime_core.generation import Client, Encoder
from slime_core.services import Service
from slime_core.types import JsonValue

__all__ = ["CallParser", "Parsed", "prompt_end", "turn_text"]

TIMEOUT_S = 60.0
IN_FLIGHT = 256

OPENING_TOKENS = 16
"""Tokens at the end of a prompt that can hold the mark with which it opens thoughts."""

MOST_NAMES = 2000
NAMES = re.compile(r'"(?P<quoted>[^"\n]{1,64})"|(?P<dotted>[A-Za-z_][\w.-]{0,63})')


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed turn.

    Arguments:
        text: the text outside of tool calls, thoughts included.
        calls: the tool calls, in order; a call may be of a tool that does not exist.
        unreadable: number of calls that the parser cannot read.
    """

    text: str
    calls: list[ToolCall]
    unreadable: int = 0


class CallParser:
    """Finds tool calls in turns.

    Arguments:
        name: name of a parser of SGLang: a key of :data:`FORMATS`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._format = FORMATS[name]
        self._services: dict[str, Service] = {}

    async def parse(self, client: Client, text: str, tools: Sequence[JsonValue], *, prompt: str = "") -> Parsed:
        """Parse ``text``; nothing inside thoughts is a call.

        SGLang's parsers drop calls of unknown tools. If a call is missing, the text is parsed again with each of its
        words as the name of a tool.

        Arguments:
            tools: descriptions of functions; if empty, nothing in ``text`` is a call.
            prompt: end of the text before the turn (:func:`prompt_end`); it may open thoughts.

        Raises:
            PluginError: the engine has no parser of this name.
            EngineError: no engine answered.
        """
        thoughts, outside = split_thoughts(text, self._format, opened=opened_thoughts(prompt))
        if not tools or not outside.strip():
            return Parsed(text, [])
        written = self._format.count(outside)
        parsed = await self._ask(client, outside, tools)
        if len(parsed.calls) < written or not self._format.is_known:
            named = await self._ask(client, outside, [*tools, *_descriptions(outside, tools)])
            parsed = max(parsed, named, key=lambda candidate: len(candidate.calls))
        return Parsed(thoughts + parsed.text, parsed.calls, max(0, written - len(parsed.calls)))

    async def _ask(self, client: Client, text: str, tools: Sequence[JsonValue]) -> Parsed:
        url = await client.engine_url()
        if url not in self._services:
            address = f"{url}/parse_function_call"
            await self._check(Service(address, timeout_s=TIMEOUT_S, max_in_flight=1, retries=False), tools)
            self._services[url] = Service(address, timeout_s=TIMEOUT_S, max_in_flight=IN_FLIGHT)
        try:
            return _parsed(await self._services[url].ask(self._body(text, tools)), text)
        except ServiceError as problem:
            raise EngineError(str(problem)) from problem

    async def _check(self, service: Service, tools: Sequence[JsonValue]) -> None:
        """Parse an empty text: sglang 0.5.23 answers an unknown parser with status 500, like any internal error."""
        try:
            await service.ask(self._body("", tools))
        except ServiceError as problem:
            if problem.status is None:
                raise EngineError(str(problem)) from problem
            raise PluginError(
                f"--tool-call-parser {self._name}: the engine does not accept it for this model: {problem}\nChoose the "
                "parser of the model's family."
            ) from problem

    def _body(self, text: str, tools: Sequence[JsonValue]) -> JsonValue:
        return {"text": text, "tools": list(tools), "tool_call_parser": self._name}


def turn_text(token_ids: Sequence[int], encoder: Encoder) -> str:
    """Decode a turn with its special tokens, which some parsers need, but without a special token that ends it."""
    ids = list(token_ids)
    if ids and not encoder.decode(ids[-1:]):
        ids.pop()
    return encoder.decode_all(ids)


def prompt_end(token_ids: Sequence[int], encoder: Encoder) -> str:
    """Decode the end of the ids before a turn, in which the chat template may have opened thoughts."""
    return encoder.decode_all(list(token_ids[-OPENING_TOKENS:]))


def _descriptions(text: str, tools: Sequence[JsonValue]) -> list[JsonValue]:
    """Return a description for each word of ``text`` that may be the name of a tool which does not exist."""
    names: dict[str, None] = {}
    for match in NAMES.finditer(text):
        names |= dict.fromkeys([*match.groups(), *re.findall(r"\w+", match[0])])
    existing = {_name(tool) for tool in tools}
    added = [name for name in names if name and name not in existing][:MOST_NAMES]
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in added]


def _name(tool: JsonValue) -> JsonValue:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _parsed(answer: JsonValue, text: str) -> Parsed:
    if not isinstance(answer, dict) or not isinstance(answer.get("calls"), list):
        raise ServiceError("an engine answered /parse_function_call with something else than calls", "invalid")
    entries = answer["calls"]
    assert isinstance(entries, list)
    calls = [
        ToolCall(str(call.get("name") or ""), str(call.get("parameters") or "{}"))
        for call in entries
        if isinstance(call, dict)
    ]
    outside = answer.get("normal_text")
    return Parsed(outside if isinstance(outside, str) else text, calls)
