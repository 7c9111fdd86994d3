"""Prints the names that Megatron-core's three configs or SGLang's parser accept, as JSON.

python -m tests.guards.engine_tables megatron-core|sglang
"""

from __future__ import annotations

import argparse
import enum
import json
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from importlib import metadata
from typing import Any, Literal, get_args, get_origin

_NAMED = {bool: "bool", int: "int", float: "float", str: "str"}
_PARSED = {"human_readable_int": "size", "loads": "json", "json_list_type": "json"}
"""Functions of SGLang that parse a value, and what they accept."""


def megatron_fields() -> Iterator[dict[str, Any]]:
    """One row for each field of the configs; type ``object`` means that no text on a command line can say its value."""
    from slime_core.cpu import megatron

    megatron.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    homes = {"transformer": MLATransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    for home, kind in homes.items():
        annotations = typing.get_type_hints(kind)
        yield from (_of_field(field, annotations[field.name], home) for field in fields(kind))


def _of_field(field: Field[Any], annotation: Any, home: str) -> dict[str, Any]:
    kind, choices = _kind(annotation)
    default = field.default
    shown = "" if default is MISSING or default is None or kind == "object" else str(_plain(default))
    return {"name": field.name, "home": home, "type": kind, "choices": choices, "default": shown}


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


def sglang_flags() -> Iterator[dict[str, Any]]:
    """One row for each flag of the parser; the first spelling names it."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    yield from map(_of_action, parser._actions)


def _of_action(action: argparse.Action) -> dict[str, Any]:
    plain = [flag.removeprefix("--") for flag in action.option_strings if not flag.startswith("--no-")]
    return {
        "name": plain[0].replace("-", "_"),
        "type": _type(action),
        "choices": sorted(str(choice) for choice in action.choices or ()),  # some are sets
        "default": "" if action.default in (None, "", [], ()) else str(action.default),
        "also": [other.replace("-", "_") for other in plain[1:]],
        "negatable": isinstance(action, argparse.BooleanOptionalAction),
    }


def _type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    name = getattr(action.type, "__name__", "str")
    one = name if name in ("int", "float") else _PARSED.get(name, "str")
    return one + ("*" if action.nargs in ("+", "*") else "")


def main(engine: str) -> None:
    found = megatron_fields() if engine == "megatron-core" else sglang_flags()
    rows = [{key: value for key, value in row.items() if value} for row in found]
    print(json.dumps({"version": metadata.version(engine), "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
