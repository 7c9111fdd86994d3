"""What is wrong with the tables of a setting that takes several, such as ``engine_models``, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from slime_core.config.mistakes import nearest
from slime_core.config.wording import is_table

__all__ = ["table_mistakes"]


def table_mistakes(kind: type[BaseModel], error: ValidationError) -> str:
    """Everything that ``error`` holds against a list of tables of ``kind``: misspelt keys first, then the others.

    Example: ``table 1: no such key model_pth; did you mean model_path?; table 1: model_path is missing``.
    """
    found = sorted(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    return "; ".join(dict.fromkeys(_mistake(kind, one) for one in found))


def _mistake(kind: type[BaseModel], error: Any) -> str:
    number, *path = error["loc"]
    where = ".".join([f"table {number + 1}", *map(str, path[:-1])])
    match error["type"]:
        case "extra_forbidden":
            return f"{where}: no such key {path[-1]}{nearest(str(path[-1]), _fields(kind, path[:-1]))}"
        case "missing":
            return f"{where}: {path[-1]} is missing"
        case "model_type":
            return f"{where} is no table"
    return f"{where}: {path[-1]} = {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _fields(kind: type[BaseModel], path: Sequence[object]) -> Sequence[str]:
    """The keys of the table that ``path`` leads to."""
    for step in path:
        if isinstance(step, str):
            inner = get_args(kind.model_fields[step].annotation)
            kind = inner[0] if inner and is_table(inner[0]) else kind
    return list(kind.model_fields)
