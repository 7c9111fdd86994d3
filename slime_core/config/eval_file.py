"""Reads the file of ``--eval-config``: evaluation sets, and defaults for all of them, in slime's form.

    defaults:                        [defaults]
      temperature: 0.6               temperature = 0.6
    datasets:                        [[datasets]]
      - name: aime                   name = "aime"
        path: aime.jsonl             path = "aime.jsonl"

All of it may stand under ``eval``, and ``datasets`` may map names to sets. A name that ends in ``.toml`` is read as
TOML, any other as YAML. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from slime_core.config.measuring import EvalDataset, dataset_of
from slime_core.config.mistakes import nearest
from slime_core.config.settings import Unacceptable
from slime_core.untrusted import MOST_TOML, parse_toml, read_text

__all__ = ["read_eval_config"]

TABLES = ("defaults", "datasets")
MOST_NODES = 100_000
"""Values of a file of evaluation sets."""

OF_ONE = ("name", "path")
"""Keys that no default can give."""


def read_eval_config(path: Path) -> tuple[EvalDataset, ...]:
    """The evaluation sets of the file, with its defaults filled in.

    Raises:
        Unacceptable: it cannot be read, or describes none; lists everything that is wrong.
    """
    content = _content(path)
    content = content["eval"] if list(content) == ["eval"] and isinstance(content["eval"], dict) else content
    defaults, problems = content.get("defaults") or {}, _misplaced(content)
    entries = _entries(content.get("datasets"))
    if entries is None or not isinstance(defaults, dict):
        raise Unacceptable("found no evaluation sets; accepted: datasets, a list of tables, and defaults, a table")
    problems += [f"defaults: {key} is of one set, not of all" for key in defaults if key in OF_ONE]
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f"found {entry!r}; accepted: a table such as {{name: aime, path: aime.jsonl}}")
            continue
        try:
            found.append(_placed(dataset_of({**defaults, **entry}), path.parent))
        except PydanticCustomError as error:
            problems.append(error.message())
    if problems:
        raise Unacceptable("; ".join(problems))
    return tuple(found)


def _content(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, limit=MOST_TOML)
        found = parse_toml(text) if path.suffix == ".toml" else _yaml(text)
    except OSError as error:
        raise Unacceptable(f"{error.strerror}; accepted: the path of a YAML or TOML file") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise Unacceptable(f"cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise Unacceptable(f"found {type(found).__name__}; accepted: a table with datasets")
    return found


def _yaml(text: str) -> Any:
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        _refuse_twice(node, set())
        if _written_out(node, {}) > MOST_NODES:
            raise ValueError(f"its aliases stand for more than {MOST_NODES:,} values")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _refuse_twice(node: Any, seen: set[int]) -> None:
    """YAML's reader would lose the first of two values of one key."""
    if node is None or isinstance(node.value, str) or id(node) in seen:
        return
    seen.add(id(node))
    pairs = [one if isinstance(one, tuple) else (None, one) for one in node.value]
    keys = [str(key.value) for key, _ in pairs if key is not None]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} stands in one table twice; give each name once")
    for _, value in pairs:
        _refuse_twice(value, seen)


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values and keys there are where every alias is written out."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = 0  # a table that holds itself has no end; YAML's reader makes it one object
        inner = [part for one in node.value for part in (one if isinstance(one, tuple) else (one,))]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def _misplaced(content: dict[str, Any]) -> list[str]:
    return [f"no such key {key}{nearest(str(key), TABLES)}" for key in content if key not in TABLES]


def _entries(datasets: object) -> list[Any] | None:
    """The sets as a list of tables; a map's keys are their names. None: there are none."""
    if isinstance(datasets, dict):
        datasets = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    return datasets if isinstance(datasets, list) and datasets else None


def _placed(one: EvalDataset, base: Path) -> EvalDataset:
    return one.model_copy(update={"path": Path(os.path.abspath(base / one.path.expanduser()))})
