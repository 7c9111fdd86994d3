"""Prints the fields of Megatron-core's three configs, as JSON; run as a script."""

from __future__ import annotations

import enum
import json
import types
import typing
from dataclasses import MISSING, Field, fields
from importlib import metadata
from typing import Any, Literal, get_args, get_origin

_NAMED = {bool: "bool", int: "int", float: "float", str: "str"}


def described(field: Field[Any], annotation: Any, home: str) -> dict[str, Any]:
    """One row of the table; type ``object`` means that no text on a command line can say its value."""
    kind, choices = _kind(annotation)
    default = field.default
    shown = "" if default is MISSING or default is None or kind == "object" else str(_plain(default))
    row = {"name": field.name, "home": home, "type": kind, "choices": choices, "default": shown}
    return {key: value for key, value in row.items() if value}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else value


def _kind(annotation: Any) -> tuple[str, list[str]]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        found = [_kind(argument) for argument in arguments if argument is not types.NoneType]
        return found[0] if len(found) == 1 else ("object", [])
    if origin is Literal:
        return "str", [str(argument) for argument in arguments]
    if origin is list and arguments[0] in _NAMED:
        return _NAMED[arguments[0]] + "*", []
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "str", [member.name for member in annotation]
    return _NAMED.get(annotation, "object"), []


def main() -> None:
    from slime_core.cpu import megatron

    megatron.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    homes = {"transformer": MLATransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    rows = []
    for home, kind in homes.items():
        annotations = typing.get_type_hints(kind)
        rows += [described(field, annotations[field.name], home) for field in fields(kind)]
    print(json.dumps({"version": metadata.version("megatron-core"), "rows": rows}))


if __name__ == "__main__":
    main()
