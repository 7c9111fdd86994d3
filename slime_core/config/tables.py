"""The names that Megatron-core's configs and SGLang's parser know, with their types, for the pinned versions.

The tables are files in ``data/``, so that checking a flag loads no engine; ``python -m
tests.guards.test_engine_tables`` writes them. ``engines`` decides which of the names a run may set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Engine = Literal["megatron-core", "sglang"]

DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True, slots=True)
class Row:
    """One name of an engine's settings.

    Example: ``Row("attention_backend", "str", choices=("triton", "torch_native"), default="triton")``.

    Arguments:
        name: with underscores.
        type: ``bool``, ``int``, ``float``, ``str``, ``size`` (a number like 32k), ``json``, ``object`` (nothing that
            text can say); with ``*``: several of them.
        choices: the only values; empty: any of the type.
        default: the engine's own, as text; empty: none.
        home: the config of Megatron that has the field: ``transformer``, ``optimizer`` or ``ddp``.
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


@cache
def rows(engine: Engine) -> tuple[Row, ...]:
    """Return the names of an engine: for Megatron-core the fields of TransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig, for SGLang the flags of its parser, without dashes."""
    table = json.loads((DATA / f"{engine}.json").read_text(encoding="utf-8"))
    return tuple(Row(**row | {key: tuple(row.get(key, ())) for key in ("choices", "also")}) for row in table["rows"])
