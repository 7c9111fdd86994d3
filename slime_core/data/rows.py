"""Reads JSON Lines; every mistake names file and line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import DataError

__all__ = ["PromptRow", "read_numbered", "read_prompts", "read_rows"]

EXAMPLE = '{"prompt": "What is 2 + 2?", "label": "4"}'


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file.

    Example: the line ``{"prompt": "37+45", "label": "82", "metadata": {"carries": 1}}``.

    Arguments:
        prompt: text, or chat messages with ``role`` and ``content``.
        label: the ground truth as text; None where the row has none.
        metadata: the row's own fields for rewards and reports.
    """

    prompt: str | list[dict[str, Any]]
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def read_rows(path: Path, *, most_bytes: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a JSON Lines file with their line numbers; empty lines are passed over.

    Arguments:
        most_bytes: read whole lines up to this size of the file and leave out the rest; None: read all.

    Raises:
        DataError: the file is missing, unreadable or empty, or a line is not a JSON object.
    """
    try:
        # Not splitlines(): it also cuts at U+2028 and U+0085, which JSON allows inside a string.
        lines = _bytes(path, most_bytes).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(
            f"{path} cannot be read: {problem}. Name a JSON Lines file in UTF-8, one object a line."
        ) from problem
    rows = [(number, _row(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise DataError(f"{path} holds no rows. Give a JSON Lines file, one object a line, such as " + EXAMPLE)
    return rows


def read_prompts(path: Path, *, input_key: str, label_key: str | None, metadata_key: str) -> list[PromptRow]:
    """All prompts of a file.

    Arguments:
        input_key, label_key, metadata_key: fields of a row; ``label_key`` None: rows have no ground truth.

    Raises:
        DataError: as :func:`read_rows`, or a row lacks a field or holds something else than is read here.
    """
    return [row for _, row in read_numbered(path, input_key=input_key, label_key=label_key, metadata_key=metadata_key)]


def read_numbered(
    path: Path, *, input_key: str, label_key: str | None, metadata_key: str, most_bytes: int | None = None
) -> list[tuple[int, PromptRow]]:
    """As :func:`read_prompts`, with line numbers, and of a large file only the first ``most_bytes``."""
    return [
        (number, _prompt(path, number, row, input_key=input_key, label_key=label_key, metadata_key=metadata_key))
        for number, row in read_rows(path, most_bytes=most_bytes)
    ]


def _bytes(path: Path, most: int | None) -> bytes:
    with path.open("rb") as stream:
        if most is None:
            return stream.read()
        # The last line is cut short, unless it ends here.
        return stream.read(most) + stream.readline()


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise DataError(
            f"{path}, line {number}, column {problem.colno}: not JSON ({problem.msg}). "
            f"Expected an object such as {EXAMPLE}"
        ) from problem
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: found {type(row).__name__}, expected an object such as {EXAMPLE}")
    return row


def _prompt(
    path: Path, number: int, row: dict[str, Any], *, input_key: str, label_key: str | None, metadata_key: str
) -> PromptRow:
    where = f"{path}, line {number}"
    if input_key not in row:
        raise DataError(
            f"{where}: no field {input_key!r}, found {', '.join(row) or 'none'}. Name the right one with --input-key."
        )
    prompt = row[input_key]
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise DataError(f"{where}: field {input_key!r} is neither text nor a list of messages with role and content")
    metadata = row.get(metadata_key, {})
    if not isinstance(metadata, dict):
        raise DataError(
            f"{where}: field {metadata_key!r} is {type(metadata).__name__}, expected an object (--metadata-key)"
        )
    return PromptRow(prompt, _label(where, row, label_key), metadata)


def _label(where: str, row: dict[str, Any], key: str | None) -> str | None:
    if key is None:
        return None
    if key not in row:
        raise DataError(f"{where}: no field {key!r}, found {', '.join(row)}. Name the right one with --label-key.")
    label = row[key]
    return label if isinstance(label, str) or label is None else json.dumps(label)


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in prompt)
    )
