"""The index of the lines of a file."""

from __future__ import annotations

import pytest

from slime_core.prompts.rows import EVERY
from slime_datasets.lines import IndexedLines, from_bytes, indexed, open_rows, to_bytes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("lines", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_index_finds_every_line(tmp_path, lines, end, monkeypatch):
    monkeypatch.setattr("slime_datasets.lines.BLOCK", 1000)
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(f'{{"n": {n}}}' for n in range(lines)) + (end if lines else ""))
    table = IndexedLines(path)
    assert table.total() == lines
    assert [raw.content.strip() for raw in table.read(0, lines)] == [f'{{"n": {n}}}'.encode() for n in range(lines)]
    for n in range(0, lines, 7):
        (raw,) = table.read(n, n + 1)
        assert raw.content.strip() == f'{{"n": {n}}}'.encode()
    assert from_bytes(to_bytes(indexed(path))).nearest(lines) == table.index.nearest(lines)


def test_a_start_in_order_reads_the_beginning_of_a_file_only(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n" * 700)
    rows = open_rows(tmp_path / "rows.jsonl", {})
    assert rows.reaches(0)
    (table,) = rows.tables
    assert table.index.frontier[0] == EVERY
