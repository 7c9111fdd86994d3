"""Finds tool calls in a turn of the model with the engine's own parsers (``POST /parse_function_call``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_agents.tools import ToolCall
from slime_core.errors import EngineError, PluginError, ServiceError
from slime_core.generation import Client, Encoder
from slime_core.services import Service
from slime_core.types import JsonValue

__all__ = ["CallParser", "Parsed", "turn_text"]

TIMEOUT_S = 60.0
IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed turn.

    Arguments:
        text: the text outside of tool calls.
        calls: the tool calls, in order.
    """

    text: str
    calls: list[ToolCall]


class CallParser:
    """Finds tool calls in turns.

    Arguments:
        name: name of a parser of SGLang, as for ``--tool-call-parser``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._services: dict[str, Service] = {}

    async def parse(self, client: Client, text: str, tools: Sequence[JsonValue]) -> Parsed:
        """Parse ``text``.

        Arguments:
            tools: descriptions of functions; if empty, nothing in ``text`` is a call.

        Raises:
            PluginError: the engine has no parser of this name.
            EngineError: no engine answered.
        """
        if not tools:
            return Parsed(text, [])
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
                f"--tool-call-parser {self._name}: {problem}\nAccepted are the names of SGLang's option of this name, "
                "such as qwen25, llama3, mistral, glm45, deepseekv3 or kimi_k2."
            ) from problem

    def _body(self, text: str, tools: Sequence[JsonValue]) -> JsonValue:
        return {"text": text, "tools": list(tools), "tool_call_parser": self._name}


def turn_text(token_ids: Sequence[int], encoder: Encoder) -> str:
    """Decode a turn with its special tokens, which some parsers need, but without a special token that ends it."""
    ids = list(token_ids)
    if ids and not encoder.decode(ids[-1:]):
        ids.pop()
    return encoder.decode_all(ids)


def _parsed(answer: JsonValue, text: str) -> Parsed:
    if not isinstance(answer, dict) or not isinstance(answer.get("calls"), list):
        raise ServiceError("an engine answered /parse_function_call with something else than calls", "invalid")
    found = answer["calls"]
    assert isinstance(found, list)
    calls = [
        ToolCall(str(one.get("name") or ""), str(one.get("parameters") or "{}"))
        for one in found
        if isinstance(one, dict)
    ]
    rest = answer.get("normal_text")
    return Parsed(rest if isinstance(rest, str) else text, calls)
