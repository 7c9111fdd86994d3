"""Which prompt files activate the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import peek
from slime_core.plugins.activation import activate


@pytest.mark.parametrize(
    ("named", "active"),
    [
        ("rows.parquet", True),
        ("rows.parquet@[:3]", True),
        ("many", True),
        ("*.parquet", True),
        ("saved", True),
        ("rows.jsonl", False),
        ("*.jsonl", False),
        ("lines", False),
    ],
)
def test_a_prompt_file_that_it_reads_activates_it(tmp_path: Path, named: str, active: bool):
    for folder in ("many", "saved", "lines"):
        (tmp_path / folder).mkdir()
    for file in ("rows.parquet", "rows.jsonl", "many/a.parquet", "many/b.jsonl", "lines/a.jsonl", "saved/state.json"):
        (tmp_path / file).write_text("")
    for flags in (("--prompt-data",), ("--eval-prompt-data", "held-out")):
        seen = peek([*flags, str(tmp_path / named)])
        found = activate([], choices=seen.choices, flags=seen.flags).registry.plugins
        assert [plugin.name for plugin in found] == ["core", *(["datasets"] if active else [])]
