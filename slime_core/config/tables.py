"""The names that Megatron-core's configs and SGLang's parser know, with their types, for the installed versions.

The tables of the pinned versions lie in ``data/``, so that checking a flag loads no engine. For another installed
version the engine's names are read in a child process (seconds) and kept in the user's cache folder. What they mean
here, and which of them a run may set, is decided in ``engines``.

``python -m tests.guards.test_engine_tables`` writes the files of ``data/`` for the installed versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from slime_core.cpu import serve as cpu
from slime_core.errors import ConfigError

Engine = Literal["megatron-core", "sglang"]

_HERE = Path(__file__).resolve().parent
_DATA = _HERE / "data"
_READER = _HERE / "readers" / "engine_tables.py"
_FORMAT = 1
"""Part of the cache file's name: raise it when what the reader prints changes."""
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
        """The row that the reader printed."""
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in described.items()}
        return cls(**values)


@cache
def rows(engine: Engine) -> tuple[Row, ...]:
    """Of Megatron-core, the fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig; of SGLang,
    what its parser accepts, without the dashes.

    Raises:
        ConfigError: another version than the pinned one is installed, and its names cannot be read.
    """
    version = _version(engine)
    kept = _cache_file(engine, version)
    held = _held(_DATA / f"{engine}.json", version) or _held(kept, version)
    if held is None:
        held = installed_rows(engine)
        _keep(kept, held)
    return tuple(map(Row.of, held["rows"]))


def installed_rows(engine: Engine) -> dict[str, Any]:
    """Version and settings of the installed engine, read in a child process: ``{"version": ..., "rows": [...]}``.

    Raises:
        ConfigError: the child failed; with its last line.
    """
    command = [sys.executable, "-W", "ignore", str(_READER), engine]
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
