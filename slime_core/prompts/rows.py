"""Reads rows of prompt files by number, without holding a file in memory, and makes prompts of them; every mistake
names file and line. ``numbered``, ``screen`` and plugin ``datasets`` call it.

:class:`LineIndex` has the offset of every 64th line of a file, as far as the file was read. :class:`Sizes` checks that
files do not change during a run.

Columnar files have types that JSON lacks, and give all objects of a column the same fields, with null where a row has
no value. ``_without_gaps``, ``_label`` and ``_input`` bring rows of both kinds of files to one form.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
import textwrap
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from slime_core.config.prompt_paths import JSON_LINES, PromptPath, format_of, unreadable
from slime_core.contracts import PromptFormat, PromptRequest, PromptTable, RawRow
from slime_core.errors import DataError
from slime_core.prompts.messages import messages_in
from slime_core.types import TOOLS, JsonLabel, JsonValue, Prompt, tools_of
from slime_core.untrusted import open_regular

__all__ = [
    "AT_ONCE",
    "EVERY",
    "NOTHING",
    "JsonLines",
    "LineIndex",
    "LineTable",
    "PromptRow",
    "Sizes",
    "content_of",
    "field_at",
    "fields_of",
    "is_chat",
    "no_rows",
    "numbered_prompts",
    "open_tables",
    "paths_of",
    "prompt_of",
    "rows_in_order",
    "shortened",
    "stamp_of",
    "unreadable",
]

EVERY = 64
"""Lines between two indexed offsets; at most so many are read to reach a line."""

ENDS = 2**16
"""Bytes at the start and at the end of a file that its stamp covers."""


class LineIndex:
    """Sorted ``offsets`` at which ``lines`` start, and how far the file has been read.

    Example: ``extend(64, 7000, is_end=False)`` says that line 64, counted from 0, starts at byte 7000.
    """

    def __init__(self) -> None:
        self.lines = array("q", [0])
        self.offsets = array("q", [0])
        self.frontier = (0, 0)
        """Number of lines that were read, and the offset of the next line."""
        self.is_whole = False

    def nearest(self, line: int) -> tuple[int, int]:
        """Return the last indexed line at or before ``line``, and its offset."""
        place = bisect_right(self.lines, line) - 1
        return self.lines[place], self.offsets[place]

    def extend(self, line: int, offset: int, *, is_end: bool) -> None:
        """Record that the file was read up to ``line``, which starts at ``offset``; ``is_end``: the file ends there."""
        self.frontier, self.is_whole = (line, offset), is_end
        if not is_end:
            self.lines.append(line)
            self.offsets.append(offset)


def stamp_of(path: Path) -> str:
    """Return the size of the file and the SHA-256 of its first and last 64 KiB; independent of the path."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as stream:
        digest.update(stream.read(ENDS))
        stream.seek(max(0, size - ENDS))
        digest.update(stream.read(ENDS))
    return f"{size}:{digest.hexdigest()[:32]}"


class Sizes:
    """Sizes of files in bytes when they were opened.

    A file that changes has no stable row numbers, so a resumed run could not find its place in it; and reading a
    memory-mapped file that was truncated kills the process.

    Raises:
        OSError: a file is not there.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._sizes = {file: file.stat().st_size for file in files}

    def check(self) -> None:
        """Raise DataError if a file has become longer or shorter. A deleted file passes: it is open and can be read."""
        for file, before in self._sizes.items():
            now = before
            with suppress(OSError):
                now = file.stat().st_size
            if now != before:
                raise DataError(
                    f"{file} had {before:,} bytes when this run opened it, and has {now:,} now. Put it back as it was "
                    "and resume from the last checkpoint; write further rows to another file"
                )


AT_ONCE = 256
"""Rows that are read from a table at once."""


class JsonLines:
    """JSON Lines, one object a line; also reads files with other suffixes."""

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """See :class:`~slime_core.PromptFormat`; ``window`` has no effect."""
        del window
        return LineTable(path)


class LineTable:
    """The lines of a file; the last may lack its line feed.

    Raises:
        DataError: the file cannot be read; from any method: the file has become longer or shorter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = open_regular(path)
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem}. Name a JSON Lines file in UTF-8.") from problem
        weakref.finalize(self, self._stream.close)
        self._sizes = Sizes([path])
        self.index = LineIndex()

    def reaches(self, row: int) -> bool:
        """Index the file up to ``row``; return whether it has that row."""
        while not self.index.is_whole and row >= self.index.frontier[0]:
            self._read_on()
        return row < self.index.frontier[0]

    def total(self) -> int:
        """Return the number of lines; reads the file to its end."""
        self.reaches(sys.maxsize)
        return self.index.frontier[0]

    def read(self, start: int, stop: int) -> Iterator[RawRow]:
        """See :class:`~slime_core.PromptTable`; starts from the nearest indexed line."""
        line, offset = self.index.nearest(start)
        self._sizes.check()
        stream = self._stream
        stream.seek(offset)
        for _ in range(start - line):
            stream.readline()
        for number in range(start, stop):
            content = stream.readline()
            if not content:
                return
            place = stream.tell()
            yield RawRow(self.path, number + 1, content)
            stream.seek(place)  # the consumer of the row may have moved the stream

    def stamp(self) -> str:
        """See :class:`~slime_core.PromptTable`."""
        return stamp_of(self.path)

    def _read_on(self) -> None:
        line, offset = self.index.frontier
        self._sizes.check()
        self._stream.seek(offset)
        lengths = [len(content) for content in islice(iter(self._stream.readline, b""), EVERY)]
        self.index.extend(line + len(lengths), offset + sum(lengths), is_end=len(lengths) < EVERY)


def open_tables(
    path: Path,
    formats: Mapping[str, PromptFormat],
    *,
    window: int | None = 0,
    lines: Callable[[Path], PromptTable] = LineTable,
) -> tuple[PromptPath, list[PromptTable]]:
    """Open the files that ``path`` names; also return the parsed path (:mod:`slime_core.config.prompt_paths`).

    Arguments:
        formats: name -> reader of its files; a file of no known format is read as JSON Lines.
        window: largest distance from file order in which rows are read; see :class:`~slime_core.PromptFormat`.
        lines: opens JSON Lines.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    where = PromptPath.read(path)
    named = [(file, format_of(file, formats)) for file in where.files(formats)]
    return where, [
        lines(file) if name is None or name in JSON_LINES else formats[name].open(file, window=window)
        for file, name in named
    ]


def rows_in_order(where: PromptPath, tables: Iterable[PromptTable]) -> Iterator[RawRow]:
    """Yield the rows that ``where`` selects, one file after the other."""
    stop = None if where.stop is None else where.stop - where.start
    return islice(_rows_from(where.start, tables), stop)


def _rows_from(start: int, tables: Iterable[PromptTable]) -> Iterator[RawRow]:
    for table in tables:
        if not table.reaches(start):
            start -= table.total()
            continue
        while table.reaches(start):
            yield from table.read(start, start + AT_ONCE)
            start += AT_ONCE
        start = 0


MOST_LETTERS = 300
"""Most letters of the names of a row's fields that a message shows."""

DEEPEST = 3
"""Levels of objects in objects whose fields a message shows."""


def _without_gaps(value: JsonValue) -> JsonValue:
    """Remove keys with null from the objects in ``value``, at any depth.

    Example: ``[{"type": "text", "image": None}]`` is ``[{"type": "text"}]``; a template that looks for images by
    ``'image' in part`` would find one otherwise.
    """
    if isinstance(value, dict):
        return {key: _without_gaps(one) for key, one in value.items() if one is not None}
    return [_without_gaps(one) for one in value] if isinstance(value, list) else value


def _input(value: object) -> JsonValue:
    """Convert an image or other input for a request: bytes, and the datasets library's ``{"bytes": ..., "path": ...}``,
    become base 64, or the path if there are no bytes. Lists are converted item by item."""
    if isinstance(value, list):
        return [_input(one) for one in value]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else cast("JsonValue", value)


def fields_of(row: Mapping[str, object]) -> str:
    """Return the names of a row's fields, for a message."""
    return shortened(row)


EXAMPLE = '{"prompt": "What is 2 + 2?", "label": "4"}'

OTHER_FORMS = (
    ". Files are read as JSON Lines: unpack a compressed one, write a JSON list as lines with jq -c '.[]', and name a "
    "Parquet file with .parquet, which slime-datasets reads"
)
"""Advice in the message about the first line of a file."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file.

    Example: the line ``{"prompt": "37+45", "label": "82", "metadata": {"carries": 1}}``.

    Arguments:
        prompt: text, or chat messages with ``role`` and ``content``; JSON text of messages has become messages.
        label: the ground truth as text; None: the row has none.
        metadata: further fields for rewards and reports; ``tools`` holds the tools for the chat template.
        inputs: kind -> the row's images or other inputs, unchanged; None: it has none.
        place: file and line, for messages.
    """

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    inputs: dict[str, JsonValue] | None = None
    place: str = field(default="", compare=False)

    @property
    def tools(self) -> list[JsonValue] | None:
        """See :func:`tools_of`."""
        return tools_of(self.metadata)


def numbered_prompts(
    request: PromptRequest, *, most_bytes: int | None = None, bad: list[str] | None = None
) -> Iterator[tuple[RawRow, PromptRow]]:
    """Yield all prompts of a request, each with its raw row, which has file and line; empty lines are skipped.

    Arguments:
        most_bytes: stop after the row that exceeds this size; None: read all.
        bad: list to which the mistakes of unreadable rows are added; None: the first mistake is raised.

    Raises:
        DataError: a file cannot be read, there is no row, or a row lacks a field or has a value of a wrong type.
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
    label = _label(raw, row, request.label_key)
    request.filter.check_label(label, metadata, raw.place, key=request.label_key)
    if request.skips_bad:  # Otherwise the prompt is checked when it is due, and an error ends the run.
        request.filter.check_prompt(prompt, metadata, raw.place)
    return PromptRow(prompt, _label_text(label), metadata, _inputs(raw, row, request), raw.place)


def content_of(raw: RawRow) -> dict[str, object]:
    """The object that a row is; of columns, with dates and other values that JSON has not.

    Raises:
        DataError: it is none.
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
    return next((found for found in inner if found is not NOTHING), NOTHING)


def _parsed(value: object) -> object:
    """The object or list that JSON text holds; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def paths_of(value: object, start: str = "") -> list[str]:
    """Return the paths of the fields in ``value``, for a message: those of an object after the object itself, down to
    the third level."""
    fields = _parsed(value) if start.count(".") < DEEPEST else None
    if not isinstance(fields, Mapping):
        return []
    return [path for name in fields for path in (f"{start}{name}", *paths_of(fields[name], f"{start}{name}."))]


def shortened(names: Iterable[str]) -> str:
    """Return names of fields, for a message."""
    return textwrap.shorten(", ".join(names), MOST_LETTERS, placeholder="...") or "none"


def _field(raw: RawRow, row: dict[str, Any], key: str, flag: str) -> Any:
    found = field_at(row, key)
    if found is NOTHING:
        raise DataError(
            f"{raw.place}: no field {key!r}, found {shortened(paths_of(row))}. Name the right one with {flag}."
        )
    return found


def _optional_field(row: dict[str, Any], key: str | None) -> Any:
    """The field, or None if the row lacks it; JSON text of an object or a list is read."""
    found = NOTHING if key is None else field_at(row, key)
    return None if found is NOTHING else _parsed(found)


def _prompt(raw: RawRow, row: dict[str, Any], key: str) -> Prompt:
    prompt: Prompt = _field(raw, row, key, "--input-key")
    prompt = (messages_in(prompt) or prompt) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise DataError(
            f"{raw.place}: field {key!r} is neither text nor a list of messages with role and content: found "
            f"{json.dumps(prompt, default=str)[:80]}"
        )
    if _is_blank(prompt):
        raise DataError(
            f"{raw.place}: the prompt in field {key!r} is empty, so that there is nothing to answer. Write one, or "
            "take the row out; of training data, --on-bad-data skip leaves such rows out and names them"
        )
    if isinstance(prompt, str) or isinstance(raw.content, bytes):
        return prompt
    # A content of null stays: an assistant that only calls a tool has it.
    return [
        {key: _without_gaps(one) for key, one in message.items() if one is not None or key == "content"}
        for message in prompt
    ]


def _metadata(raw: RawRow, row: dict[str, Any], key: str) -> dict[str, Any]:
    metadata: Any = _optional_field(row, key)
    metadata = {} if metadata is None else metadata
    if not isinstance(raw.content, bytes):  # of columns: there may be dates, which JSON has not
        metadata = json.loads(json.dumps(metadata, default=str))
    if not isinstance(metadata, dict):
        raise DataError(f"{raw.place}: field {key!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
    return metadata


def _label(raw: RawRow, row: dict[str, Any], key: str | None) -> JsonValue:
    """The ground truth as JSON: dates and exact decimals as they are written."""
    if key is None:
        return None
    label = _field(raw, row, key, "--label-key, or say with --label-key none that rows have none")
    if isinstance(label, bytes) or (isinstance(label, float) and not math.isfinite(label)):
        found = "bytes, which are no text" if isinstance(label, bytes) else f"{label}, which is not a number"
        raise DataError(
            f"{raw.place}: field {key!r} holds {found} (--label-key); accepted: text, a number, lists or objects of "
            "these, or null where there is no ground truth"
        )
    if isinstance(label, list | dict | tuple):
        return (
            label if isinstance(raw.content, bytes) else cast("JsonValue", json.loads(json.dumps(label, default=str)))
        )
    return label if label is None or isinstance(label, bool | int | float) else str(label)


def _label_text(label: JsonValue) -> str | None:
    """Return the label of a sample: an object or a list as JSON."""
    if isinstance(label, list | dict):
        return JsonLabel(json.dumps(label))
    return label if label is None or isinstance(label, str) else json.dumps(label)


def _tools(raw: RawRow, row: dict[str, Any], key: str | None) -> list[Any] | None:
    """The row's tools; text is JSON of them, since columns cannot hold objects of different forms."""
    tools = _optional_field(row, key)
    if isinstance(tools, str) and not tools.strip():
        tools = None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(
            f"{raw.place}: field {key!r} is not a list of tools, which are objects, as JSON or its text (--tool-key): "
            f"found {json.dumps(field_at(row, str(key)), default=str)[:80]}"
        )
    return (tools if isinstance(raw.content, bytes) else list(map(_without_gaps, tools or ()))) or None


def _inputs(raw: RawRow, row: dict[str, Any], request: PromptRequest) -> dict[str, Any] | None:
    found = {kind: _field(raw, row, key, "--multimodal-keys") for kind, key in request.multimodal_keys}
    return {kind: _input(value) for kind, value in found.items() if value is not None} or None


def is_chat(prompt: object) -> bool:
    """Whether ``prompt`` is a list of chat messages, each with role and content."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and _is_message(message) for message in prompt)
    )


def _is_message(message: dict[str, Any]) -> bool:
    """Only a user has to say something: an assistant may call a tool without a word."""
    role, content = message.get("role"), message.get("content", None if message.get("tool_calls") else 0)
    return isinstance(role, str) and (isinstance(content, str | list) or (content is None and role != "user"))


def _is_blank(prompt: Prompt) -> bool:
    """Whether the prompt, or every message of it, is blank."""
    if isinstance(prompt, str):
        return not prompt.strip()
    contents = [value for message in prompt for key, value in message.items() if key not in ("role", "name")]
    return not any(map(_says_something, contents))


def _says_something(value: JsonValue) -> bool:
    """Whether a field of a message holds more than blanks; of parts, also images and the like do."""
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return any(str(part["text"]).strip() for part in value if isinstance(part, dict))
    return bool(value.strip() if isinstance(value, str) else value)
