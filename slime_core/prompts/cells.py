"""Values of rows as a run takes them. Columns know kinds that JSON has not, and write null where only other rows have a
value: a table of Arrow gives all its objects the same fields."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import cast

from slime_core.errors import DataError
from slime_core.types import JsonValue, Sample

__all__ = ["fields_of", "input_of", "label_of", "label_text", "message_of", "without_gaps"]

MOST_FIELDS, MOST_LETTERS = 12, 40
"""Of a row that are shown, and of the name of one."""


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


def label_text(sample: Sample, reward: str) -> str:
    """The label as text, without surrounding white space.

    Raises:
        DataError: there is none for reward model ``reward`` to compare with.
    """
    if sample.label is None:
        raise DataError(
            f"reward model {reward!r}: sample {sample.index} of group {sample.group_index} has no label to compare "
            "with.\n"
            "Name the label's field with --label-key, or choose another reward model."
        )
    # From a data source of the user's own it may be a number.
    return str(sample.label).strip()


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
