"""Where the engines' names come from when another version is installed than the one whose table is shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_core.config import tables
from slime_core.errors import ConfigError

OTHER = {"version": "0.5.99", "rows": [{"name": "brand_new", "type": "int"}]}


@pytest.fixture
def read_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """SGLang 0.5.99 is installed; the engines whose tables were read."""
    calls: list[str] = []

    def read(engine: str) -> dict[str, Any]:
        calls.append(engine)
        return OTHER

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tables, "_version", lambda engine: "0.5.99")
    monkeypatch.setattr(tables, "installed_rows", read)
    tables.rows.cache_clear()
    yield calls
    tables.rows.cache_clear()


def names() -> list[str]:
    tables.rows.cache_clear()
    return [row.name for row in tables.rows("sglang")]


def test_the_table_of_another_version_is_read_once_and_cached(read_tables: list[str], tmp_path: Path) -> None:
    assert names() == names() == ["brand_new"]
    assert read_tables == ["sglang"]
    assert [path.name for path in (tmp_path / "slime").iterdir()] == ["sglang-0.5.99-1.json"]


def test_a_broken_cache_is_read_again(read_tables: list[str], tmp_path: Path) -> None:
    names()
    (tmp_path / "slime" / "sglang-0.5.99-1.json").write_text("[1]")
    assert names() == ["brand_new"]
    assert read_tables == ["sglang", "sglang"]


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(
    read_tables: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert names() == ["brand_new"]


def test_an_engine_that_does_not_answer_is_an_error_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_READER", "no_such_reader.py")
    with pytest.raises(ConfigError, match=r"flags of sglang 0.5.23 cannot be read: .*No such file"):
        tables.installed_rows("sglang")


def test_the_shipped_table_serves_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "installed_rows", lambda engine: pytest.fail("read"))
    tables.rows.cache_clear()
    held = json.loads((tables._DATA / "megatron-core.json").read_text(encoding="utf-8"))
    assert len(tables.rows("megatron-core")) == len(held["rows"]) == 334
