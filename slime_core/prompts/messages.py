"""Brings chat messages to the form that a chat template reads, and finds messages that it leaves out.

``PromptTokenizer.render`` calls it, so that rows of every format, evaluation sets, requests of agents and answers of
tools are treated alike. What a template reads is found by rendering short conversations, once per template.
"""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime_core.errors import DataError
from slime_core.types import JsonValue

__all__ = ["ChatTemplate", "form_of", "messages_in"]

log = logging.getLogger(__name__)

Message = dict[str, Any]
Messages = Sequence[Mapping[str, JsonValue]]
Tools = Sequence[JsonValue] | None

Render = Callable[[Messages, Tools, bool], str]
"""Renders messages with tools; True: ends with the header of the assistant's turn. Raises DataError if it fails."""

PROBE = "zq7probe"
"""Text that no template contains."""

MARKS = ("80461739", "51736408")
"""Starts of the texts for a message and for a call's name. Digits, because templates change letters."""

PROBE_TOOL: dict[str, JsonValue] = {
    "name": f"{PROBE}tool",  # some templates read tools that are functions themselves
    "type": "function",
    "function": {
        "name": f"{PROBE}tool",
        "description": "Say something.",
        "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "Text."}}},
    },
}

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a part of OpenAI's APIs that is text -> its field."""

THOUGHT_ENDS = (
    "</think>",
    "</thinking>",
    "</thought>",
    "</seed:think>",
    "[/THINK]",
    "<channel|>",
    "<|END_THINKING|>",
    "◁/think▷",
)
"""Ends of thoughts; templates leave out the text before them in earlier turns."""

MEANS_NULL = frozenset({"arguments", "default", "const", "enum", "examples"})
"""Fields of tool calls and of JSON schemas in which null is a value."""

MOST_SHAPES = 1024
"""Forms of conversations that a template remembers."""

ASSISTANT = "assistant"

_said: set[str] = set()


def messages_in(text: str) -> list[dict[str, JsonValue]] | None:
    """Return the messages in ``text``, a JSON list of objects that each have a role, or None for other text.

    Example: ``'[{"role": "user", "content": "2 + 2?"}]'``, as columns of tables hold messages.
    """
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )
    return value if is_chat and value else None


def form_of(prompt: str | Messages, *, has_tools: bool) -> object:
    """Return what a template may treat differently in a prompt: roles, fields, kinds of content and their order."""
    if isinstance(prompt, str):
        return has_tools
    forms = [_raw_form(message) for message in prompt]
    return frozenset(zip([None, *forms], [*forms, None], strict=True)), has_tools


def _raw_form(message: Mapping[str, Any]) -> tuple[object, ...]:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    kinds = (type(content), bool(content), *((part.get("type") if isinstance(part, dict) else str) for part in parts))
    fields = frozenset((key, type(value)) for key, value in message.items() if key != "content")
    return message.get("role"), kinds, fields


@dataclass(frozen=True, slots=True)
class _Reads:
    """Forms of a call's arguments that a template writes as one JSON object, or its equivalent."""

    objects: bool
    text: bool


class ChatTemplate:
    """A chat template: the inputs that it reads, and a check that its result has all messages.

    Arguments:
        source: its text.
        render: renders with it.
        where: its folder, for messages.
    """

    def __init__(self, source: str, render: Render, where: object) -> None:
        self._source = source
        self._render = render
        self._where = where
        self._lost: dict[object, frozenset[int]] = {}

    @cached_property
    def shows_tools(self) -> bool:
        """Return whether the result depends on tools."""
        user = {"role": "user", "content": PROBE}
        conversations = ([user], [{"role": "system", "content": PROBE}, user])
        return any(self._try(messages) != self._try(messages, [PROBE_TOOL]) for messages in conversations)

    @cached_property
    def wants_parts(self) -> bool:
        """Return whether it reads lists of parts only, not text."""
        return not self._reads(PROBE) and self.reads_parts

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether it reads lists of parts."""
        return self._reads([{"type": "text", "text": PROBE}])

    @cached_property
    def has_developer(self) -> bool:
        """Return whether it has the role ``developer``. Many templates write any role, which the model never saw."""
        developer, user = ({"role": role, "content": PROBE} for role in ("developer", "user"))
        return "developer" in self._source and self._try([developer, user], asks=True).count(PROBE) == 2

    @cached_property
    def reads_arguments(self) -> _Reads:
        """Forms of arguments that it reads."""
        return _Reads(self._writes_arguments({"k": PROBE}), self._writes_arguments(f'{{"k": "{PROBE}"}}'))

    def normal_form(self, messages: Messages) -> list[dict[str, JsonValue]]:
        """Return ``messages`` as the template reads them.

        Fields of null are removed, and a content of null is empty text; parts are joined to text, or text becomes a
        part; ``developer`` becomes ``system`` if the template lacks it; arguments of calls become objects or JSON text.

        Raises:
            DataError: a part is no text and the template does not read parts, or arguments are no JSON object.
        """
        formed = []
        for place, message in enumerate(messages):
            try:
                formed.append(self._message(message))
            except ValueError as problem:
                raise DataError(f"{_name(messages, place)}: {problem}") from None
        return formed

    def check(
        self,
        messages: Messages,
        formed: Sequence[dict[str, JsonValue]],
        text: str,
        *,
        tools: Tools,
        asks: bool,
        first: int = 0,
    ) -> None:
        """Raise DataError if ``text``, the rendered conversation, lacks a message or a tool; names it.

        Thoughts of earlier turns of the assistant may be missing.

        Arguments:
            messages: as they were given.
            formed: their normal form.
            asks: see :data:`Render`.
            first: the first message to check; messages are counted from there.
        """
        lost = self._lost_by_shape(formed, tools, asks)
        rendered = _Rendered(text)
        for place in range(first, len(formed)):
            missing = next((piece for piece in _pieces(formed[place]) if piece not in rendered), None)
            if missing is None and place in lost:
                missing = _text_of(formed[place]) or "tool calls"
            if missing is None or (place not in lost and self._is_thought(formed, place, tools)):
                continue
            raise DataError(
                f"{_name(messages[first:], place - first)}: the chat template in {self._where} leaves out its "
                f"{missing.strip()[:60]!r}. Write it as a message that the template renders, such as one system "
                "message at the start and turns of user and assistant, or take a checkpoint with another template"
            )
        if tools and not self.shows_tools:
            raise DataError(
                f"the chat template in {self._where} renders the same text with and without tools, so the model cannot "
                "know them. Leave them out (--tools, --tool-key, tools of a request), or take a checkpoint whose "
                "template writes tools"
            )

    def _try(self, messages: Sequence[Message], tools: Tools = None, *, asks: bool = False) -> str:
        """Return the rendered conversation; empty: the template refuses it."""
        try:
            return self._render(messages, tools, asks)
        except DataError:
            return ""

    def _reads(self, content: JsonValue) -> bool:
        user = {"role": "user", "content": content}
        text = self._try([user], asks=True)
        return PROBE in text and "'text'" not in text and '"text"' not in text

    def _writes_arguments(self, arguments: JsonValue) -> bool:
        call = {"id": "call00001", "type": "function", "function": {"name": f"{PROBE}tool", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": ASSISTANT, "content": "", "tool_calls": [call]},
            {"role": "tool", "name": f"{PROBE}tool", "tool_call_id": "call00001", "content": "!"},
        ]
        for tools in (None, [PROBE_TOOL]):
            for stop in (3, 2):
                text = self._try(messages[:stop], tools)
                if PROBE in text.replace(f"{PROBE}tool", ""):
                    return not any(quote in text for quote in ("'k'", '\\"k', "\\u0022k", "&#34;k", "&quot;k"))
        return False

    def _message(self, original: Mapping[str, Any]) -> Message:
        message: Message = {key: _without_nulls(value) for key, value in original.items() if value is not None}
        if message.get("role") == "developer" and not self.has_developer:
            message["role"] = "system"
            _say_once(
                f"the chat template in {self._where} has no role 'developer'; such messages are rendered as 'system'"
            )
        message["content"] = self._content(original.get("content"), message.get("role"))
        if "function_call" in message:  # OpenAI's older form
            message["tool_calls"] = [{"function": message.pop("function_call")}, *message.get("tool_calls", ())]
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def _content(self, content: Any, role: object) -> Any:
        if content is None or isinstance(content, str):
            return [{"type": "text", "text": content or ""}] if self.wants_parts else content or ""
        is_data = isinstance(content, list) and not any(
            isinstance(part, str) or "type" in part or "text" in part for part in content
        )
        if role in ("tool", "function") and (isinstance(content, dict) or (content and is_data)):
            return self._content(json.dumps(content, ensure_ascii=False), role)
        if not isinstance(content, list):
            raise ValueError(f"its content is {type(content).__name__}; accepted: text, or a list of parts")
        parts = [_part(part) for part in content]
        others = [part for part in parts if part.get("type") != "text"]
        if others and not self.reads_parts:
            raise ValueError(
                f"its content has a part of type {others[0].get('type')!r}, but the chat template in {self._where} "
                "reads text only; accepted: text, or parts of type 'text'"
            )
        if others or self.wants_parts:
            return parts
        # Templates that read parts write them without a separator.
        return ("" if self.reads_parts else "\n").join(part["text"] for part in parts)

    def _call(self, original: Any) -> Message:
        if not isinstance(original, dict):
            raise ValueError(f"a tool call is {type(original).__name__}; accepted: an object with a function")
        call = original if isinstance(original.get("function"), dict) else _wrapped(original)
        function = call["function"]
        if not isinstance(function.get("name"), str):
            raise ValueError(
                "a tool call has no name; accepted: an object with a function, which has name and arguments"
            )
        arguments = self._arguments(function.get("arguments"), function["name"])
        return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}

    def _arguments(self, arguments: Any, name: str) -> Any:
        reads = self.reads_arguments
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str) and reads.objects:
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict) and reads.text:
                return arguments
            if not isinstance(value, dict):
                raise ValueError(
                    f"the arguments of its call of {name!r} are {arguments[:60]!r}; accepted: a JSON object, because "
                    f"the chat template in {self._where} writes objects"
                )
            return value
        if not isinstance(arguments, str) and reads.text and not reads.objects:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments

    def _lost_by_shape(self, messages: Sequence[Message], tools: Tools, asks: bool) -> frozenset[int]:
        """Return the places of messages that the template leaves out whatever their text is.

        Short texts, such as 4, may be in the result by chance; therefore a conversation of the same shape, with markers
        as texts, is rendered once.
        """
        shape = (tuple(map(_shape, messages)), bool(tools), asks)
        if shape not in self._lost:
            if len(self._lost) >= MOST_SHAPES:
                self._lost.clear()
            self._lost[shape] = self._lost_markers(messages, tools, asks)
        return self._lost[shape]

    def _lost_markers(self, messages: Sequence[Message], tools: Tools, asks: bool) -> frozenset[int]:
        marked = [_marked(message, place) for place, message in enumerate(messages)]
        text = self._try(marked, tools, asks=asks)
        if not text:  # The template refuses markers as text.
            return frozenset()
        return frozenset(
            place
            for place, message in enumerate(marked)
            if any(piece not in text for piece in _markers(message)) and not self._is_thought(marked, place, tools)
        )

    def _is_thought(self, messages: Sequence[Message], place: int, tools: Tools) -> bool:
        """Return whether the template leaves the assistant's text out because it is of an earlier turn."""
        if messages[place].get("role") != ASSISTANT:
            return False
        rendered = _Rendered(self._try(messages[: place + 1], tools))
        return place + 1 < len(messages) and all(piece in rendered for piece in _pieces(messages[place]))


class _Rendered:
    """A rendered conversation; ``piece in rendered`` compares without white space, and finds escaped text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __contains__(self, piece: str) -> bool:
        return piece.strip() in self._text or any(form in self._squeezed for form in _forms(piece))

    @cached_property
    def _squeezed(self) -> str:
        return "".join(self._text.split())


def _forms(piece: str) -> Iterator[str]:
    """Yield the forms in which templates write a text, without white space."""
    stripped = piece.strip()
    in_json = json.dumps(stripped, ensure_ascii=False)[1:-1]
    in_ascii = json.dumps(stripped)[1:-1]
    for form in (stripped, in_json, in_ascii, *map(_html_safe, (in_json, in_ascii)), html.escape(stripped)):
        yield "".join(form.split())
    yield "".join(html.escape(stripped).replace("&quot;", "&#34;").replace("&#x27;", "&#39;").split())


def _html_safe(text: str) -> str:
    """Escape JSON as Jinja's ``tojson`` does."""
    for letter in "<>&'":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(text)


def _name(messages: Messages, place: int) -> str:
    return f"message {place + 1} of {len(messages)} (role {messages[place].get('role')!r})"


def _without_nulls(value: Any) -> Any:
    """Remove keys with null from the objects in ``value``, at any depth; not from arguments."""
    if isinstance(value, dict):
        return {
            key: entry if key in MEANS_NULL else _without_nulls(entry)
            for key, entry in value.items()
            if entry is not None or key in MEANS_NULL
        }
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _part(original: Any) -> Message:
    if isinstance(original, str):
        return {"type": "text", "text": original}
    if not isinstance(original, dict):
        raise ValueError(
            f"a part of its content is {type(original).__name__}; accepted: text, or an object with a type"
        )
    part: Message = _without_nulls(original)
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        return part
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind!r} has no text; accepted: {{'type': 'text', 'text': ...}}")
    return {"type": "text", "text": text}


def _wrapped(call: Message) -> Message:
    """Give a call that consists of name and arguments the form of OpenAI's API."""
    inner = ("name", "arguments")
    others = {key: value for key, value in call.items() if key not in (*inner, "type", "function")}
    return {**others, "function": {key: call[key] for key in inner if key in call}}


def _text_of(message: Message) -> str:
    """Return the text of the message's content; empty: it has none."""
    content = message["content"]
    if isinstance(content, str):
        return content.strip()
    return "".join(part["text"] for part in content if part.get("type") == "text").strip()


def _pieces(message: Message) -> Iterator[str]:
    """Yield the texts that the rendered message must contain."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part.get("type") == "text"]
    for text in texts:
        yield _after_thoughts(text) if message.get("role") == ASSISTANT else text
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                yield arguments
        yield from _strings_in(arguments) if not isinstance(arguments, str) else ()


def _after_thoughts(text: str) -> str:
    return text[max(text.rfind(end) + len(end) if end in text else 0 for end in THOUGHT_ENDS) :]


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings_in(entry)


def _shape(message: Message) -> tuple[object, ...]:
    """Return what a template may look at, aside from texts."""
    content = message["content"]
    kinds = bool(content.strip()) if isinstance(content, str) else tuple(part.get("type") for part in content)
    others = tuple(sorted(key for key in message if key != "content"))
    return message.get("role"), kinds, others, len(message.get("tool_calls", ()))


def _marked(message: Message, place: int) -> Message:
    """Return the message with markers as its text and as names of its calls."""
    content, marker = message["content"], f"{MARKS[0]}{place:05}"
    if isinstance(content, str):
        content = marker if content.strip() else content
    else:
        texts = (index for index, part in enumerate(content) if part.get("type") == "text" and part["text"].strip())
        first = next(texts, None)
        content = [{**part, "text": marker} if index == first else part for index, part in enumerate(content)]
    marked = {**message, "content": content}
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": f"{MARKS[1]}{place:05}{number:05}"}}
            for number, call in enumerate(message["tool_calls"])
        ]
    return marked


def _markers(message: Message) -> list[str]:
    """Return the markers of a message of :func:`_marked`."""
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [text for text in (_text_of(message), *names) if text.startswith(MARKS)]
