"""The names that Megatron-core's configs and SGLang's parser know, with their types, for the installed versions.

The tables of the pinned versions lie in ``data/``, so that checking a flag loads no engine. For another installed
version the engine's names are read in a child process (seconds) and kept in the user's cache folder. What they mean
here, and which of them a run may set, is decided in ``engine_sections``.

``python -m slime_core.config.tables ENGINE`` is that child process; without ENGINE it writes the files of ``data/`` for
the installed versions.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from slime_core.cpu import serve as cpu
from slime_core.errors import ConfigError

__all__ = ["Row", "installed_rows", "megatron_rows", "sglang_rows"]

Engine = Literal["megatron-core", "sglang"]

_DATA = Path(__file__).resolve().parent / "data"
_FORMAT = 1
"""Part of the cache file's name: raise it when what the child process prints changes."""
_READ_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One name.

    Example: ``Row("attention_backend", "str", choices=("triton", "torch_native"), default="triton")``.

    Arguments:
        name: with underscores.
        type: ``bool``, ``int``, ``float``, ``str``, ``size`` (a number like 32k), ``json``, ``object`` (nothing that
            text can say); with ``*``: several of them.
        choices: the only values; empty: any of the type.
        default: the engine's own, as text; empty: none.
        home: which config of Megatron has the field: ``transformer``, ``optimizer`` or ``ddp``.
        also: other spellings.
        negatable: the engine's parser knows ``--no-name`` too.
    """

    name: str
    type: str
    choices: tuple[str, ...] = ()
    default: str = ""
    home: str = ""
    also: tuple[str, ...] = ()
    negatable: bool = False

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Row:
        """The row that the child process printed."""
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in described.items()}
        return cls(**values)


@cache
def megatron_rows() -> tuple[Row, ...]:
    """The fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.

    Raises:
        ConfigError: another version than the pinned one is installed, and its names cannot be read.
    """
    return _rows("megatron-core")


@cache
def sglang_rows() -> tuple[Row, ...]:
    """What SGLang's parser accepts, without the dashes.

    Raises:
        ConfigError: another version than the pinned one is installed, and its names cannot be read.
    """
    return _rows("sglang")


def installed_rows(engine: Engine) -> dict[str, Any]:
    """What the installed engine says of itself, read in a child process: ``{"version": ..., "rows": [...]}``.

    Raises:
        ConfigError: the child failed; with its last line.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", "slime_core.config.tables", engine]
    ours = cpu.server_environment() if engine == "sglang" else {}
    try:
        done = subprocess.run(
            command, env=os.environ | ours, capture_output=True, text=True, timeout=_READ_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(_unreadable(engine, f"no answer within {_READ_LIMIT_S} s")) from None
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(_unreadable(engine, (done.stderr.splitlines() or ["no output"])[-1])) from None
    return found


def _unreadable(engine: Engine, reason: str) -> str:
    return (
        f"the flags of {engine} {_version(engine)} cannot be read: {reason}; install a version that imports, "
        f"or leave {engine}'s own flags out"
    )


def _rows(engine: Engine) -> tuple[Row, ...]:
    version = _version(engine)
    shipped = _held(_DATA / f"{engine}.json", version)
    kept = _cache_file(engine, version)
    held = shipped or _held(kept, version)
    if held is None:
        held = installed_rows(engine)
        _keep(kept, held)
    return tuple(map(Row.of, held["rows"]))


def _version(engine: Engine) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(engine)
    # Settings can be looked at where no engine is installed: the pinned names are then the ones to know.
    return str(json.loads((_DATA / f"{engine}.json").read_text(encoding="utf-8"))["version"])


def _held(path: Path, version: str) -> dict[str, Any] | None:
    """The table in ``path`` if it is one of this version; a file that is broken is no table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        [Row.of(row) for row in table["rows"]]
        return table if table["version"] == version else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _cache_file(engine: Engine, version: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "slime" / f"{engine}-{version}-{_FORMAT}.json"


def _keep(path: Path, table: Mapping[str, Any]) -> None:
    """Written aside and moved, so that a run that starts at the same time reads a whole file; a cache may fail."""
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(table), encoding="utf-8")
        draft.replace(path)


def _text(table: Mapping[str, Any]) -> str:
    """One row a line, so that a change of version is a readable difference."""
    rows = ",\n".join(json.dumps(row) for row in table["rows"])
    return f'{{"version": {json.dumps(table["version"])}, "rows": [\n{rows}\n]}}\n'


_NAMED = {bool: "bool", int: "int", float: "float", str: "str"}
_PARSED = {"human_readable_int": "size", "loads": "json", "json_list_type": "json"}
"""Functions of SGLang that parse a value, and what they accept."""


def _megatron_fields() -> Iterator[dict[str, Any]]:
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


def _sglang_flags() -> Iterator[dict[str, Any]]:
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


def _described(engine: Engine) -> dict[str, Any]:
    found = _megatron_fields() if engine == "megatron-core" else _sglang_flags()
    rows = [{key: value for key, value in row.items() if value} for row in found]
    return {"version": metadata.version(engine), "rows": rows}


if __name__ == "__main__":
    for name in get_args(Engine):
        if sys.argv[1:] == [name]:
            print(json.dumps(_described(name)))
        elif not sys.argv[1:]:
            (_DATA / f"{name}.json").write_text(_text(installed_rows(name)), encoding="utf-8")
