"""Makes prompts of rows; every mistake names file and line.

Columnar files have types that JSON lacks, and give all objects of a column the same fields, null if a row has no
value. ``_without_gaps``, ``_label`` and ``_input`` bring rows of both kinds of files to one form.
"""

from __future__ import annotations

import base64
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from slime_core.errors import DataError
from slime_core.prompts.messages import messages_in
from slime_core.provisional import PromptRequest, PromptRow
from slime_core.types import TOOLS, JsonLabel, JsonValue, Prompt
from slime_datasets.formats import open_rows
from slime_datasets.paths import PromptPath
from slime_datasets.tables import Row

__all__ = ["content_of", "has_field", "is_chat", "names_in", "no_rows", "prompt_of", "prompts_of", "size_of"]

MOST_LETTERS = 300
"""Most characters of the names of a row's fields in a message."""

EXAMPLE = '{"prompt": "What is 2 + 2?", "label": "4"}'

OTHER_FORMS = (
    ". Files are read as JSON Lines: unpack a compressed one, write a JSON list as lines with jq -c '.[]', and name a "
    "Parquet file with .parquet"
)
"""Advice in the message about the first line of a file."""


def prompts_of(
    request: PromptRequest, *, most_bytes: int | None = None, bad: list[str] | None = None
) -> Iterator[tuple[Row, PromptRow]]:
    """Yield all prompts of a request, each with its row; empty lines are skipped.

    Arguments:
        most_bytes: stop after the row that exceeds this size; None reads all.
        bad: list to which the mistakes of unreadable rows are added; None if the first mistake is raised.

    Raises:
        DataError: a file cannot be read, there is no row, or a row lacks a field or has a value of a wrong type.
    """
    num_rows = num_bytes = 0
    rows = open_rows(request.path)
    for raw in rows.read():
        if most_bytes is not None and num_bytes > most_bytes:
            break
        num_bytes += size_of(raw)
        if raw.is_blank:
            continue
        num_rows += 1
        try:
            row = prompt_of(raw, request)
        except DataError as mistake:
            if bad is None:
                raise
            bad.append(str(mistake))
            continue
        yield raw, row
    if not num_rows:
        raise no_rows(request.path, rows.num_in_files)


def no_rows(path: Path, num_in_files: int) -> DataError:
    """Make the error of ``path`` that names no row; its files have ``num_in_files``."""
    start = PromptPath.read(path).start
    if start and start >= num_in_files:
        return DataError(f"{path}: the slice starts at row {start}, counted from 0, but there are {num_in_files} rows")
    return DataError(f"{path} holds no rows. Name a file with rows, such as JSON Lines, one object a line: {EXAMPLE}")


def size_of(raw: Row) -> int:
    """Return the size of the row in bytes of JSON."""
    return len(raw.content) if isinstance(raw.content, bytes) else len(json.dumps(raw.content, default=str))


def prompt_of(raw: Row, request: PromptRequest) -> PromptRow:
    """Return the prompt that a row holds.

    Raises:
        DataError: see :func:`prompts_of`.
    """
    row = content_of(raw)
    prompt = _prompt(raw, row, request.input_key)
    metadata = _metadata(raw, row, request.metadata_key)
    tools = _tools(raw, row, request.tool_key)
    metadata = metadata if tools is None else {**metadata, TOOLS: tools}
    label = _label(raw, row, request.label_key)
    request.filter.check(metadata, label, raw.place)
    if request.skips_bad:  # Otherwise the prompt is checked when it is due, and an error ends the run.
        request.filter.check_prompt(prompt, metadata, raw.place)
    return PromptRow(prompt, _label_text(label), metadata, _inputs(raw, row, request), raw.place)


def content_of(raw: Row) -> dict[str, object]:
    """Return the object that a row is; of columns, with dates and other values that JSON lacks.

    Raises:
        DataError: it is not an object.
    """
    if not isinstance(raw.content, bytes):
        return dict(raw.content)
    expected = f"Expected an object such as {EXAMPLE}{OTHER_FORMS if raw.number == 1 else ''}"
    try:
        row = json.loads(raw.line.decode("utf-8").rstrip("\r\n"))
        if b"\\ud" in raw.line.lower():  # half of a character, which JSON can hold and text cannot
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as problem:
        raise DataError(f"{raw.place}, column {problem.colno}: not JSON ({problem.msg}). {expected}") from problem
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{raw.place}: not JSON in UTF-8 ({problem}). {expected}") from problem
    if not isinstance(row, dict):
        raise DataError(f"{raw.place}: found {type(row).__name__}. {expected}")
    return row


def has_field(raw: Row, key: str) -> bool:
    """Return whether the row has a value in the field ``key``, which may be a path."""
    return field_at(content_of(raw), key) not in (None, NOTHING)


def names_in(row: Iterable[str]) -> str:
    """Return the names of a row's fields, for a message."""
    return textwrap.shorten(", ".join(row), MOST_LETTERS, placeholder="...") or "none"


NOTHING = object()
"""Result of :func:`field_at` for a field that the row lacks."""


def field_at(value: object, key: str) -> object:
    """Return the field ``key`` of an object, or :data:`NOTHING`.

    A field of that very name wins. Otherwise ``key`` is a path: dots lead into objects, also into those that are stored
    as JSON text, and numbers into lists.

    Example: ``reward_model.ground_truth`` of ``{"reward_model": {"style": "rule", "ground_truth": "72"}}`` is ``"72"``;
    ``final_answer.0`` of ``{"final_answer": ["3", "4"]}`` is ``"3"``.
    """
    fields = _parsed(value)
    if fields is None:  # a column of objects holds null in rows without one
        return None
    if isinstance(fields, list):
        fields = {f"{place}": entry for place, entry in enumerate(fields)}
    if not isinstance(fields, Mapping) or key in fields:
        return fields[key] if isinstance(fields, Mapping) else NOTHING
    ends = [place for place, letter in enumerate(key) if letter == "." and key[:place] in fields]
    inner = (field_at(fields[key[:end]], key[end + 1 :]) for end in reversed(ends))  # names may hold dots, too
    return next((field for field in inner if field is not NOTHING), NOTHING)


def _parsed(value: object) -> object:
    """Return the object or list that JSON text holds; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _field(raw: Row, row: dict[str, Any], key: str, flag: str) -> Any:
    value = field_at(row, key)
    if value is NOTHING:
        raise DataError(f"{raw.place}: no field {key!r} among {names_in(row)}. Name the right one with {flag}.")
    return value


def _optional_field(row: dict[str, Any], key: str | None) -> Any:
    """Return the field, or None if the row lacks it; JSON text of an object or a list is parsed."""
    value = NOTHING if key is None else field_at(row, key)
    return None if value is NOTHING else _parsed(value)


def _prompt(raw: Row, row: dict[str, Any], key: str) -> Prompt:
    prompt: Prompt = _field(raw, row, key, "--input-key")
    prompt = (messages_in(prompt) or prompt) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise DataError(
            f"{raw.place}: field {key!r} is neither text nor a list of messages with role and content: "
            f"{json.dumps(prompt, default=str)[:80]}"
        )
    if _is_blank(prompt):
        raise DataError(f"{raw.place}: the prompt in field {key!r} is empty. Write one, or add --on-bad-data skip")
    if isinstance(prompt, str) or isinstance(raw.content, bytes):
        return prompt
    # A content of null stays: an assistant that only calls a tool has it.
    return [
        {key: _without_gaps(value) for key, value in message.items() if value is not None or key == "content"}
        for message in prompt
    ]


def _metadata(raw: Row, row: dict[str, Any], key: str) -> dict[str, Any]:
    metadata = _optional_field(row, key)
    if not isinstance(metadata, dict | None):
        raise DataError(f"{raw.place}: field {key!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
    return cast("dict[str, Any]", _as_json(raw, metadata or {}))


def _label(raw: Row, row: dict[str, Any], key: str | None) -> JsonValue:
    """Return the ground truth as JSON: dates and exact decimals as they are written."""
    if key is None:
        return None
    label = _field(raw, row, key, "--label-key, or add --label-key none if rows have no labels")
    if isinstance(label, bytes) or (isinstance(label, float) and not math.isfinite(label)):
        raise DataError(
            f"{raw.place}: field {key!r} holds {label!r:.40} (--label-key); accepted: text, a number, lists or objects "
            "of these, or null if there is no ground truth"
        )
    if isinstance(label, list | dict | tuple):
        return _as_json(raw, label)
    return label if label is None or isinstance(label, bool | int | float) else str(label)


def _as_json(raw: Row, value: Any) -> JsonValue:
    """Return ``value`` as JSON; columns may hold dates and other values that JSON lacks."""
    return cast("JsonValue", value if isinstance(raw.content, bytes) else json.loads(json.dumps(value, default=str)))


def _label_text(label: JsonValue) -> str | None:
    """Return the label of a sample: an object or a list as JSON."""
    if isinstance(label, list | dict):
        return JsonLabel(json.dumps(label))
    return label if label is None or isinstance(label, str) else json.dumps(label)


def _tools(raw: Row, row: dict[str, Any], key: str | None) -> list[Any] | None:
    """Return the row's tools; they may be JSON text, because columns cannot hold objects of different forms."""
    tools = _optional_field(row, key)
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(
            f"{raw.place}: field {key!r} is not a list of tools, which are objects (--tool-key): "
            f"{json.dumps(tools, default=str)[:80]}"
        )
    return (tools if isinstance(raw.content, bytes) else list(map(_without_gaps, tools))) or None


def _inputs(raw: Row, row: dict[str, Any], request: PromptRequest) -> dict[str, Any] | None:
    values = {kind: _field(raw, row, key, "--multimodal-keys") for kind, key in request.multimodal_keys}
    return {kind: _input(value) for kind, value in values.items() if value is not None} or None


def is_chat(prompt: object) -> bool:
    """Return whether ``prompt`` is a list of chat messages, each with role and content."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and _is_message(message) for message in prompt)
    )


def _is_message(message: dict[str, Any]) -> bool:
    """Only a user's message needs content: an assistant may call a tool without text."""
    role, content = message.get("role"), message.get("content", None if message.get("tool_calls") else 0)
    return isinstance(role, str) and (isinstance(content, str | list) or (content is None and role != "user"))


def _is_blank(prompt: Prompt) -> bool:
    """Return whether the prompt, or every message of it, is blank."""
    if isinstance(prompt, str):
        return not prompt.strip()
    contents = [value for message in prompt for key, value in message.items() if key not in ("role", "name")]
    return not any(map(_has_content, contents))


def _has_content(value: JsonValue) -> bool:
    """Return whether a field of a message holds more than blanks; parts other than text, such as images, count."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return any(str(part["text"]).strip() for part in value if isinstance(part, dict))
    return bool(value.strip() if isinstance(value, str) else value)


def _without_gaps(value: JsonValue) -> JsonValue:
    """Remove keys with null from the objects in ``value``, at any depth.

    Example: ``[{"type": "text", "image": None}]`` is ``[{"type": "text"}]``; a template that looks for images by
    ``'image' in part`` would find one otherwise.
    """
    if isinstance(value, dict):
        return {key: _without_gaps(field) for key, field in value.items() if field is not None}
    return [_without_gaps(entry) for entry in value] if isinstance(value, list) else value


def _input(value: object) -> JsonValue:
    """Convert an image or other input for a request: bytes, and the datasets library's ``{"bytes": ..., "path": ...}``,
    become base 64, or the path if there are no bytes. Lists are converted item by item."""
    if isinstance(value, list):
        return [_input(entry) for entry in value]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else cast("JsonValue", value)
