"""``--eval-config FILE``: evaluation sets, and defaults for all of them, in slime's format.

    defaults:                        [defaults]
      temperature: 0.6               temperature = 0.6
    datasets:                        [[datasets]]
      - name: aime                   name = "aime"
        path: aime.jsonl             path = "aime.jsonl"

All of it may be under ``eval``, and ``datasets`` may map names to sets. A file with the suffix ``.toml`` is read as
TOML, any other as YAML. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, nearest
from slime_core.provisional import DerivedSetting
from slime_core.types import JsonValue

__all__ = ["derived_sets", "read_sets"]

TABLES = ("defaults", "datasets")

OF_ONE = ("name", "path")
"""Keys that must be given for each set, not as a default."""

MOST_NODES = 100_000
"""Limit on the values of a file, counted with YAML's aliases expanded."""

NOT_TAKEN = {
    "custom_rm_path": "a set names a component, rm_type; code by path is for the whole run, --custom-rm-path",
    "custom_generate_function_path": "a set names a component, generate_function; code by path is for the whole run",
    "skip_special_tokens": "texts are decoded from the ids here, which are kept whole",
    "no_stop_trim": "texts are decoded from the ids here, which are kept whole",
    "metadata_overrides": "not built yet; rows hold their metadata",
    "multimodal_keys": "not built yet for a single set",
    "apply_chat_template_kwargs": "not built yet for a single set",
    "tool_key": "not built yet for a single set",
}
"""Keys of slime's evaluation sets that are not accepted -> the reason."""


def derived_sets(path: Path) -> Iterator[DerivedSetting]:
    """Yield the evaluation sets of ``path`` as the core's ``eval_datasets``.

    Raises:
        ConfigError: see :func:`read_sets`.
    """
    yield DerivedSetting("eval_datasets", read_sets(path), "eval_config", given="later")


def read_sets(path: Path) -> list[JsonValue]:
    """Return the evaluation sets of a file as tables, with its defaults filled in; the core checks the tables.

    Raises:
        ConfigError: the file cannot be read or has no sets; lists every mistake.
    """
    content = _content(path)
    content = content["eval"] if list(content) == ["eval"] and isinstance(content["eval"], dict) else content
    defaults, entries = content.get("defaults") or {}, _entries(content.get("datasets"))
    if entries is None or not isinstance(defaults, dict):
        raise _wrong(path, "found no evaluation sets; accepted: datasets, a list of tables, and defaults, a table")
    problems = [f"no such key {key}{nearest(str(key), TABLES)}" for key in content if key not in TABLES]
    problems += [f"defaults: {key} is of one set, not of all" for key in defaults if key in OF_ONE]
    sets: list[JsonValue] = []
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f"found {entry!r}; accepted: a table such as {{name: aime, path: aime.jsonl}}")
            continue
        values = {str(key): value for key, value in {**defaults, **entry}.items()}
        refused = [f"{key}: {NOT_TAKEN[key]}" for key in values if key in NOT_TAKEN]
        problems += [f"evaluation set {values.get('name', '(without a name)')}: {text}" for text in refused]
        sets.append(_placed(values, path.parent))
    if problems:
        raise _wrong(path, "; ".join(problems))
    return sets


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"--eval-config {path}: {problem}")


def _content(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        raise _wrong(path, "there is no such file; accepted: the path of a YAML or TOML file")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except (OSError, ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise _wrong(path, f"cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise _wrong(path, f"found {type(content).__name__}; accepted: a table with datasets")
    return content


def _yaml(text: str) -> object:
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        _refuse_twice(node, set())
        if _written_out(node, {}) > MOST_NODES:
            raise ValueError(f"its aliases expand to more than {MOST_NODES:,} values")
        content: object = yaml.safe_load(text)
        return content
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _refuse_twice(node: Any, visited: set[int]) -> None:
    """Refuse duplicate keys, because YAML's reader would silently drop the first value."""
    if node is None or isinstance(node.value, str) or id(node) in visited:
        return
    visited.add(id(node))
    pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in node.value]
    keys = [str(key.value) for key, _ in pairs if key is not None]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is in one table twice; give each name once")
    for _, value in pairs:
        _refuse_twice(value, visited)


def _written_out(node: Any, sizes: dict[int, int]) -> int:
    """Return the number of values and keys with every alias expanded."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = 0  # stops at a table that contains itself, which YAML's reader represents as one object
        inner = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = 1 + sum(_written_out(part, sizes) for part in inner)
    return sizes[id(node)]


def _entries(datasets: object) -> list[Any] | None:
    """Return the sets as a list of tables; the keys of a map are their names. None: there are none."""
    if isinstance(datasets, dict):
        datasets = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    return datasets if isinstance(datasets, list) and datasets else None


def _placed(values: Mapping[str, Any], base: Path) -> JsonValue:
    path = values.get("path")
    placed = {"path": os.path.abspath(base / Path(path).expanduser())} if isinstance(path, str) else {}
    return {**values, **placed}
