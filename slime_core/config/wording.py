"""What a setting accepts and what its value is, in words and in TOML: for messages, help and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.measuring import EvalDataset
from slime_core.config.secrets import without_secret

__all__ = ["InWords", "accepted_words", "as_toml", "as_words", "is_table", "placeholder_of"]

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    EvalDataset: "a table",
}
_BOUNDS = {Ge: "of at least", Gt: "greater than", Le: "at most", Lt: "less than"}


@dataclass(frozen=True, slots=True)
class InWords:
    """Says what a type of our own accepts; stands in the metadata of its annotation."""

    text: str


def accepted_words(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """The annotation in words; empty for types that have none here."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if told := [entry.text for entry in metadata if isinstance(entry, InWords)]:
        return told[0]
    if origin is Annotated:
        return accepted_words(arguments[0], _flat(arguments[1:]))
    if origin in (Union, UnionType):
        return " or ".join(["none" if kind is NoneType else accepted_words(kind, metadata) for kind in arguments])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple and get_origin(arguments[0]) is tuple:
        pair = [accepted_words(kind).replace("text", "a name") for kind in get_args(arguments[0])]
        return f"pairs of {' and '.join(pair)}, or none"
    if origin is tuple and is_table(arguments[0]):
        return f"tables with {', '.join(arguments[0].model_fields)}; as a flag each a JSON object"
    if origin is tuple:
        return f"any number of values, each {accepted_words(arguments[0])}"
    match _flat(metadata):
        case [Ge(ge=int(low)), Le(le=int(high))] if low == high:
            return str(low)
    return " ".join(filter(None, [_WORDS.get(annotation, ""), _bounds(metadata)]))


def placeholder_of(annotation: Any) -> str:
    """What stands for a value of the annotation in help, as ``N`` for a number; empty for a switch."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return placeholder_of(arguments[0])
    if origin in (Union, UnionType):
        return placeholder_of(next(kind for kind in arguments if kind is not NoneType))
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        if is_table(arguments[0]):
            return "JSON ..."
        pair = get_args(arguments[0]) if get_origin(arguments[0]) is tuple else ()
        return " ".join([*map(placeholder_of, pair or arguments[:1]), "..."]).replace("NAME PATH", "NAME FILE")
    return {bool: "", int: "N", float: "X", Path: "PATH", EvalDataset: "TABLE"}.get(annotation, "NAME")


def is_table(annotation: Any) -> bool:
    """Whether a value of it is written as a table, which as a flag is a JSON object."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(metadata: Sequence[object]) -> str:
    found = []
    for entry in _flat(metadata):
        match entry:
            case Ge(ge=limit) | Gt(gt=limit) | Le(le=limit) | Lt(lt=limit):
                found.append(f"{_BOUNDS[type(entry)]} {limit}")
    return " and ".join(found)


def _flat(metadata: Sequence[object]) -> list[object]:
    return [entry for item in metadata for entry in (item.metadata if isinstance(item, FieldInfo) else [item])]


def as_toml(value: object) -> str:
    """A value as TOML writes it; tables without what is at its default."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            # TOML's basic strings are JSON's, but for one control character.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case BaseModel():
            return as_toml({name: entry for name, entry in value if entry != type(value).model_fields[name].default})
        case dict():
            return f"{{ {', '.join(f'{as_toml(key)} = {as_toml(entry)}' for key, entry in value.items())} }}"
    raise TypeError(f"a setting of type {type(value).__name__} cannot be written as TOML")


def as_words(value: Any) -> str:
    """The value as one would write it after its flag; of an address with a secret in it, what may be shown."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return " ".join(map(as_words, value)) or "(empty)"
        case float():
            short = f"{value:g}"
            return short if float(short) == value else repr(value)
        case BaseModel():
            return as_toml(value)
        case str():
            return without_secret(value)
    return str(value)
