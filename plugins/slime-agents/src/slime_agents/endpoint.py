"""Serves OpenAI's chat completions API over HTTP from the engines of a run: on loopback, one key for each rollout.

Endpoint   the server; it runs while a rollout uses it
Access     base URL, key and model name for one agent

Supported: ``POST /v1/chat/completions`` with messages, tools, ``n``, ``max_tokens``, ``stop`` and ``stream``, and ``GET
/v1/models``. A stream sends the whole answer in one piece. ``temperature``, ``top_p`` and ``seed`` of requests are
ignored, because trained tokens are sampled with the settings of the run. Fields that would change the meaning of an
answer (``logprobs``, a schema, a forced tool) and unknown fields are refused with status 400; their neutral values are
accepted.

A call that the model cannot make (an unknown tool, or a call that the parser cannot read) does not reach the agent: the
model gets an error as the tool's answer. If the turn has no other call, it continues within the same request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_agents.conversations import Message, ReadMessage, Reply, Request, Rollout, TooLongError, TurnsUsedError
from slime_agents.parsing import CallParser, Parsed, prompt_end, turn_text
from slime_agents.tools import no_tool, unreadable
from slime_core.errors import DataError, EngineError, PluginError
from slime_core.generation import GenerateContext, Interrupted, Turn
from slime_core.types import JsonValue

__all__ = ["MODEL", "Access", "Endpoint", "Session"]

MODEL = "policy"
"""The model name that the endpoint lists; requests may contain any other name."""

LARGEST_REQUEST = 16 * 2**20
"""Bytes."""

MOST_ANSWERS = 16

BACKLOG = 4096
"""Limit of pending connections: all agents of a rollout connect at once, and a connection beyond the limit waits
seconds for TCP's retransmission."""

Stops = tuple[str, ...]


class _Fields(BaseModel):
    """Base of objects in a request: declared fields are validated, other fields are passed through."""

    model_config = ConfigDict(extra="allow", frozen=True)


class _CalledFunction(_Fields):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(_Fields):
    function: _CalledFunction


class _Part(_Fields):
    type: Literal["text", "input_text", "output_text", "refusal"] = "text"


class _Message(_Fields):
    role: Annotated[str, Field(min_length=1)]
    content: str | list[str | _Part] | None = None
    tool_calls: list[_Call] | None = None


class _Function(_Fields):
    name: str


class _Tool(_Fields):
    function: _Function


class _StreamOptions(_Fields):
    include_usage: bool | None = None


class _TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]


class ChatRequest(BaseModel):
    """The accepted fields of a request; null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Without effect on an answer.
    model: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    # Ignored: the sampling settings of the run apply.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    # Only the values that change nothing.
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: _TextFormat | None = None
    modalities: tuple[Literal["text"]] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["auto", "none"] | None = None

    def to_request(self) -> Request:
        """Convert to the record that :meth:`Rollout.answer` takes."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return Request(
            tuple(entry.model_dump(exclude_unset=True) for entry in self.messages),
            tuple(entry.model_dump(exclude_unset=True) for entry in self.tools or () if self.tool_choice != "none"),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(stop),
            n=self.n or 1,
        )


@dataclass(slots=True)
class Session:
    """State of one rollout, as the request handlers see it.

    Arguments:
        rollout: its conversations.
        context: the engines and the tokenizer.

    Attributes:
        failure: error that ends the rollout: an aborted turn, no engine answered, or an unknown parser name.
        ended: set when ``failure`` is set.
        is_full: True after a request was refused because the rollout had no room or no turns left.
        refusal: why the last refused request was refused; empty: none was.
    """

    rollout: Rollout
    context: GenerateContext
    failure: Interrupted | EngineError | PluginError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_full: bool = False
    refusal: str = ""

    def fail(self, failure: Interrupted | EngineError | PluginError) -> None:
        """End the rollout with ``failure``; later requests are refused. The first failure is kept."""
        self.failure = self.failure or failure
        self.ended.set()


@dataclass(frozen=True, slots=True)
class Access:
    """Base URL, key and model name for one agent.

    Arguments:
        base_url: base URL for OpenAI's clients.
        api_key: key of this rollout alone.
        model: model name for requests.
    """

    base_url: str
    api_key: str
    model: str = MODEL


class Endpoint:
    """The HTTP server; it starts with the first of several concurrent rollouts and stops with the last.

    Arguments:
        parser: finds tool calls in turns.
    """

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[Access]:
        """Route requests with a new key to ``session`` while the context is open; yields the URL and the key."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        try:
            async with self._starting:
                if self._runner is None:
                    await self._start()
            yield Access(f"{self._url}/v1", key)
        finally:
            del self._sessions[key]
            async with self._starting:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> None:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG)
        await site.start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._runner = runner

    def _session(self, request: web.Request) -> Session | None:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if kind.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._session(request) is None:
            return _unknown_key()
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "slime"}
        return _json({"object": "list", "data": [entry]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _unknown_key()
        try:
            chat_request = ChatRequest.model_validate_json(await request.read())
        except ValidationError as problem:
            return _refused(session, _mistakes(problem))
        if session.failure is not None:
            return _over()
        try:
            replies = await session.rollout.answer(chat_request.to_request(), self._reader(session, chat_request))
        except TooLongError:
            session.is_full = True
            return _error(400, "the conversation fills the model's context", "context_length_exceeded")
        except TurnsUsedError:
            session.is_full = True
            return _error(400, "the rollout has had all its turns (--max-turns)", "max_turns")
        except DataError as problem:
            return _refused(session, str(problem))
        except (Interrupted, EngineError, PluginError) as failure:
            session.fail(failure)
            return _over()
        body = _completion(replies)
        if not chat_request.stream:
            return _json(body)
        options = chat_request.stream_options
        return await _stream(request, body, shows_usage=options is not None and bool(options.include_usage))

    def _reader(self, session: Session, chat_request: ChatRequest) -> Any:
        tools, stops = chat_request.to_request().tools, chat_request.to_request().stop
        names = [str(tool.function.name) for tool in chat_request.tools or ()]
        encoder = session.context.encoder

        async def read(turn: Turn, before: Sequence[int]) -> ReadMessage:
            text = turn_text(turn.token_ids, encoder)
            prompt = prompt_end(before, encoder)
            parsed = await self._parser.parse(session.context.client, text, tools, prompt=prompt)
            calls = [call for call in parsed.calls if call.name in names]
            message: dict[str, JsonValue] = {"role": "assistant"}
            message["content"] = _without_stop(parsed.text if calls else turn.text, stops)
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [
                    {
                        "id": f"call_{secrets.token_hex(8)}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ]
            return ReadMessage(message, tuple(_errors(parsed, names)))

        return read


def _errors(parsed: Parsed, names: Sequence[str]) -> Iterator[tuple[int, Message]]:
    """Yield the answers to the invalid calls of a turn, each with its position among all calls."""
    for position, call in enumerate(parsed.calls):
        if call.name not in names:
            yield position, {"role": "tool", "name": call.name, "content": f"error: {no_tool(call.name, names)}"}
    if parsed.unreadable:
        content = f"error: {unreadable(parsed.unreadable, names)}"
        yield len(parsed.calls), {"role": "tool", "name": "unreadable", "content": content}


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` without the stop text that ended it, as OpenAI's API does."""
    return next((text.removesuffix(stop) for stop in stops if text.endswith(stop)), text)


def _completion(replies: Sequence[Reply]) -> dict[str, Any]:
    sampled = sum(reply.sampled_tokens for reply in replies)
    read = replies[0].prompt_tokens
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [_choice(number, reply) for number, reply in enumerate(replies)],
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
    }


def _choice(number: int, reply: Reply) -> dict[str, Any]:
    reason = "tool_calls" if reply.message.get("tool_calls") else reply.turn.finish_reason
    return {"index": number, "message": dict(reply.message), "logprobs": None, "finish_reason": reason}


async def _stream(request: web.Request, body: Mapping[str, Any], *, shows_usage: bool) -> web.StreamResponse:
    """Send ``body`` as server-sent events: for each choice its message in one piece, then its finish reason.

    Arguments:
        shows_usage: send the usage in a last event without choices, which clients expect only on request.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.force_close()
    await response.prepare(request)
    head = {**body, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    for choice in body["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        part = {"index": choice["index"], "delta": delta, "finish_reason": None}
        await _send(response, {**head, "choices": [part]})
        await _send(response, {**head, "choices": [part | {"delta": {}, "finish_reason": choice["finish_reason"]}]})
    if shows_usage:
        await _send(response, {**head, "choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _json(body: Mapping[str, Any], *, status: int = 200) -> web.Response:
    """Return a JSON response that closes its connection.

    The clients of all agents may share one connection pool. For each request, ``httpx``'s pool scans every idle
    connection and offers one idle connection to all waiting requests, which costs more than new connections do.
    """
    response = web.json_response(body, status=status)
    response.force_close()
    return response


def _error(status: int, message: str, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)


def _refused(session: Session, message: str) -> web.Response:
    session.refusal = message
    return _error(400, message, "invalid_request_error")


def _unknown_key() -> web.Response:
    return _error(401, "the key is that of no rollout in progress", "invalid_api_key")


def _over() -> web.Response:
    # Not 409 or 5xx, because OpenAI's clients retry those.
    return _error(400, "the rollout has ended", "rollout_ended")


def _mistakes(problem: ValidationError) -> str:
    mistakes = problem.errors()
    text = "; ".join(f"{'.'.join(map(str, mistake['loc'])) or 'body'}: {mistake['msg']}" for mistake in mistakes)
    if any(mistake["type"] == "extra_forbidden" for mistake in mistakes):
        text += f". Accepted are {', '.join(sorted(ChatRequest.model_fields))}"
    return text
