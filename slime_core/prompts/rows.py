"""From the rows of a file to prompts; every mistake names file and line.

Columns know kinds that JSON lacks, and write null where only other rows have a value: a table of Arrow gives all its
objects the same fields. The first functions below bring both to one form.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from slime_core.config.prompt_paths import PromptPath
from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptRequest, RawRow
from slime_core.prompts.tables import open_tables, rows_in_order
from slime_core.types import JsonValue

__all__ = [
    "Prompt",
    "PromptRow",
    "content_of",
    "fields_of",
    "input_of",
    "is_chat",
    "label_of",
    "message_of",
    "no_rows",
    "numbered_prompts",
    "prompt_of",
    "tools_of",
    "without_gaps",
]


MOST_FIELDS, MOST_LETTERS = 12, 40
"""Most fields of a row, and most letters of a name, that a message shows."""


def without_gaps(value: JsonValue) -> JsonValue:
    """``value`` with no null under a key of an object in it, at any depth: what is missing is not there.

    Example: ``[{"type": "text", "image": None}]`` is ``[{"type": "text"}]``; a template that looks for images by
    ``'image' in part`` would find one otherwise.
    """
    if isinstance(value, dict):
        return {key: without_gaps(one) for key, one in value.items() if one is not None}
    return [without_gaps(one) for one in value] if isinstance(value, list) else value


def message_of(message: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A chat message of a column, without gaps; its ``content`` is there, and may be null."""
    kept = {key: without_gaps(one) for key, one in message.items() if one is not None}
    return {**kept, "content": without_gaps(message["content"])}


def label_of(value: object) -> str | None:
    """A ground truth as text: lists and objects as JSON, dates and exact decimals as they are written.

    Raises:
        ValueError: it has no text: bytes, or a number that is none; says what it is.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("bytes, which are no text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value}, which is no number")
    if isinstance(value, bool | int | float | list | dict | tuple):
        return json.dumps(value, default=str)
    return str(value)


def input_of(value: object) -> JsonValue:
    """An image and the like as a request can carry it: bytes, and what the datasets library writes for an image
    (``{"bytes": ..., "path": ...}``), as base 64; the path where there are no bytes. Lists, one by one."""
    if isinstance(value, list):
        return [input_of(one) for one in value]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else cast("JsonValue", value)


def fields_of(row: Mapping[str, object]) -> str:
    """The names of a row's fields, for a message."""
    names = [name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}..." for name in list(row)[:MOST_FIELDS]]
    more = [f"{len(row) - MOST_FIELDS} more"] if len(row) > MOST_FIELDS else []
    return ", ".join([*names, *more]) or "none"


EXAMPLE = '{"prompt": "What is 2 + 2?", "label": "4"}'

PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
"""First bytes of compressed files."""

PARQUET = b"PAR1"

Prompt = str | list[dict[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file.

    Example: the line ``{"prompt": "37+45", "label": "82", "metadata": {"carries": 1}}``.

    Arguments:
        prompt: text, or chat messages with ``role`` and ``content``.
        label: the ground truth as text; None where the row has none.
        metadata: the row's own fields for rewards and reports; under ``tools`` those that the chat template is given.
        inputs: kind -> what the row holds of images and the like, as it stands there; None: nothing.
    """

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    inputs: dict[str, JsonValue] | None = None

    @property
    def tools(self) -> list[JsonValue] | None:
        """See :func:`tools_of`."""
        return tools_of(self.metadata)


TOOLS = "tools"
"""Key of a sample's metadata, as in slime."""


def tools_of(metadata: Mapping[str, JsonValue]) -> list[JsonValue] | None:
    """The tools that the chat template is given: objects under ``tools``. None: there are none, or something else."""
    tools = metadata.get(TOOLS)
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def numbered_prompts(
    request: PromptRequest, *, most_bytes: int | None = None, bad: list[str] | None = None
) -> Iterator[tuple[RawRow, PromptRow]]:
    """All prompts of a request, each with where it stands; empty lines are passed over.

    Arguments:
        most_bytes: read up to this size, and the row in which it lies; None: read all.
        bad: takes the mistakes of rows that cannot be read, which are passed over; None: they are raised.

    Raises:
        DataError: nothing can be read there or no row is, or a row lacks a field or holds something else than is read
            here.
    """
    rows = seen = 0
    where, tables = open_tables(request.path, request.formats)
    for raw in rows_in_order(where, tables):
        if most_bytes is not None and seen > most_bytes:
            break
        seen += size_of(raw)
        if raw.is_blank:
            continue
        rows += 1
        try:
            row = prompt_of(raw, request)
        except DataError as mistake:
            if bad is None:
                raise
            bad.append(str(mistake))
            continue
        yield raw, row
    if not rows:
        raise no_rows(request.path, sum(table.total() for table in tables))


def no_rows(path: Path, found: int) -> DataError:
    """The error of ``path`` that names no row; ``found`` are in its files."""
    start = PromptPath.read(path).start
    if start and start >= found:
        return DataError(f"{path}: the slice starts at row {start}, counted from 0, but there are only {found} rows")
    return DataError(
        f"{path} holds no rows. Give a file that holds some, such as JSON Lines, one object a line: {EXAMPLE}"
    )


def size_of(raw: RawRow) -> int:
    """Bytes of the row, in JSON."""
    return len(raw.content) if isinstance(raw.content, bytes) else len(json.dumps(raw.content, default=str))


def prompt_of(raw: RawRow, request: PromptRequest) -> PromptRow:
    """The prompt that a row holds.

    Raises:
        DataError: see :func:`numbered_prompts`.
    """
    row = content_of(raw)
    prompt = _prompt(raw, row, request.input_key)
    metadata = _metadata(raw, row, request.metadata_key)
    tools = _tools(raw, row, request.tool_key)
    metadata = metadata if tools is None else {**metadata, TOOLS: tools}
    request.filter.check(metadata, raw.place)
    return PromptRow(prompt, _label(raw, row, request.label_key), metadata, _inputs(raw, row, request))


def content_of(raw: RawRow) -> dict[str, object]:
    """The object that a row is; of columns, with dates and other values that JSON has not.

    Raises:
        DataError: it is none.
    """
    if not isinstance(raw.content, bytes):
        return dict(raw.content)
    line = raw.line
    try:
        row = json.loads(line.decode("utf-8").rstrip("\r\n"))
        if b"\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as problem:
        raise DataError(_unreadable(raw, line, problem)) from problem
    if raw.number == 1 and isinstance(row, list):
        raise DataError(_array(raw))
    if not isinstance(row, dict):
        raise DataError(f"{raw.place}: found {type(row).__name__}, expected an object such as {EXAMPLE}")
    return row


def _unreadable(raw: RawRow, line: bytes, problem: Exception) -> str:
    """The mistake in a line that is no JSON."""
    if raw.number == 1 and (found := _of_another_form(raw, line)):
        return found
    if isinstance(problem, UnicodeDecodeError):
        return f"{raw.place}: not UTF-8 ({problem}). Name a JSON Lines file in UTF-8."
    if isinstance(problem, UnicodeEncodeError):
        half = f"{problem.object[problem.start : problem.end]!a}"
        return (
            f"{raw.place}: {half} is half of a character, which no text can hold. Write both halves, or leave it out."
        )
    if isinstance(problem, RecursionError):
        found = "lists or objects too deep inside one another to be read"
        return f"{raw.place}: {found}. Expected an object such as {EXAMPLE}"
    if isinstance(problem, json.JSONDecodeError):
        place = f"{raw.place}, column {problem.colno}"
        return f"{place}: not JSON ({problem.msg}). Expected an object such as {EXAMPLE}"
    return f"{raw.place}: a number too long to be read. Write numbers of more than 4,300 digits as text."


def _of_another_form(raw: RawRow, line: bytes) -> str | None:
    """Advice for a file that is no JSON Lines, by its first bytes; None: it may be JSON Lines."""
    if line.startswith(PARQUET):
        if raw.file.suffix == ".parquet":
            return (
                f"{raw.file} is Parquet, which plugin datasets reads; install slime-datasets, or add --plugin datasets"
            )
        return f"{raw.file} is Parquet, and its name does not end in .parquet; give it a name that does"
    packed = next((name for mark, name in PACKED.items() if line.startswith(mark)), None)
    if packed is not None:
        return f"{raw.file} is compressed ({packed}); unpack it first"
    return _array(raw) if line.lstrip().startswith(b"[") else None


def _array(raw: RawRow) -> str:
    return (
        f"{raw.file} is one JSON list; accepted: JSON Lines, one object a line, such as {EXAMPLE}. "
        f"jq -c '.[]' {raw.file} writes them so"
    )


def _prompt(raw: RawRow, row: dict[str, Any], key: str) -> Prompt:
    if key not in row:
        raise DataError(f"{raw.place}: no field {key!r}, found {fields_of(row)}. Name the right one with --input-key.")
    prompt = row[key]
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise DataError(
            f"{raw.place}: field {key!r} is neither text nor a list of messages with role and content: found "
            f"{json.dumps(prompt, default=str)[:80]}"
        )
    if _says_nothing(prompt):
        raise DataError(
            f"{raw.place}: the prompt in field {key!r} is empty, so that there is nothing to answer. Write one, or "
            "take the row out; of training data, --on-bad-data skip leaves such rows out and names them"
        )
    return prompt if isinstance(prompt, str) or isinstance(raw.content, bytes) else list(map(message_of, prompt))


def _metadata(raw: RawRow, row: dict[str, Any], key: str) -> dict[str, Any]:
    found = row.get(key)
    metadata: Any = {} if found is None else found
    if not isinstance(raw.content, bytes):  # of columns: there may be dates, which JSON has not
        metadata = json.loads(json.dumps(metadata, default=str))
    if not isinstance(metadata, dict):
        raise DataError(f"{raw.place}: field {key!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
    return metadata


def _label(raw: RawRow, row: dict[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    if key not in row:
        raise DataError(
            f"{raw.place}: no field {key!r}, found {fields_of(row)}. Name the right one with --label-key, or say with "
            "--label-key none that rows have none."
        )
    try:
        return label_of(row[key])
    except ValueError as problem:
        raise DataError(
            f"{raw.place}: field {key!r} holds {problem} (--label-key); accepted: text, a number, lists or objects of "
            "these, or null where there is no ground truth"
        ) from None


def _tools(raw: RawRow, row: dict[str, Any], key: str | None) -> list[Any] | None:
    """The row's tools; text is JSON of them, since columns cannot hold objects of different forms."""
    tools = None if key is None else row.get(key)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            tools = 0
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(
            f"{raw.place}: field {key!r} is no list of tools, which are objects, as JSON or as its text (--tool-key): "
            f"found {json.dumps(row[str(key)], default=str)[:80]}"
        )
    return (tools if isinstance(raw.content, bytes) else list(map(without_gaps, tools or ()))) or None


def _inputs(raw: RawRow, row: dict[str, Any], request: PromptRequest) -> dict[str, Any] | None:
    for kind, key in request.multimodal_keys:
        if key not in row:
            raise DataError(
                f"{raw.place}: no field {key!r} with what is to be {kind}, found {fields_of(row)}. Name the right one "
                "with --multimodal-keys."
            )
    return {kind: input_of(row[key]) for kind, key in request.multimodal_keys if row[key] is not None} or None


def is_chat(prompt: object) -> bool:
    """Whether it is a list of chat messages, each with role and content."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and _is_message(message) for message in prompt)
    )


def _is_message(message: dict[str, Any]) -> bool:
    """Only a user has to say something: an assistant may call a tool without a word."""
    role, content = message.get("role"), message.get("content", 0)
    return isinstance(role, str) and (isinstance(content, str | list) or (content is None and role != "user"))


def _says_nothing(prompt: Prompt) -> bool:
    """Whether there is nothing but blanks in it, or in all of its messages."""
    if isinstance(prompt, str):
        return not prompt.strip()
    reported = [value for message in prompt for key, value in message.items() if key not in ("role", "name")]
    return not any(one.strip() if isinstance(one, str) else one for one in reported)
