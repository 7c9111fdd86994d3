"""Prompt files: what a path names, where lines start, and rows that are held in memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptFilter, PromptRequest, RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.config.prompt_paths import PromptPath
from slime_core.errors import DataError
from slime_core.prompts.rows import EVERY, LineTable, open_tables, rows_in_order


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def source(path: Path, **request: Any) -> PromptFiles:
    return PromptFiles(None, RunView(prompts=PromptRequest(path, **{"label_key": None, **request})))


def test_a_filter_gets_many_prompts_at_once_with_their_tools(tmp_path):
    path = tmp_path / "tools.jsonl"
    path.write_text('{"prompt": "a", "tools": [{"name": "t"}]}\n{"prompt": "b", "tools": "[{}]"}\n{"prompt": "c"}\n')
    passed: list[Any] = []

    class Selecting(PromptFilter):
        def select(self, prompts: Any) -> list[bool]:
            passed.extend(prompts)
            return [prompt != "b" for prompt, _ in prompts]

    prompts = source(path, shuffle=False, tool_key="tools", filter=Selecting())
    assert passed == [("a", [{"name": "t"}]), ("b", [{}]), ("c", None)]
    (first,), (second,) = prompts.next_groups(2)
    assert (first.metadata, second.metadata) == ({"tools": [{"name": "t"}]}, {})


def test_images_and_the_like_come_as_they_stand(tmp_path):
    path = tmp_path / "images.jsonl"
    path.write_text('{"prompt": "a", "pictures": ["x.png"]}\n{"prompt": "b", "pictures": null}\n')
    first, second = source(path, shuffle=False, multimodal_keys=(("image", "pictures"),)).next_groups(2)
    assert (first[0].multimodal_inputs, second[0].multimodal_inputs) == ({"image": ["x.png"]}, None)
    with pytest.raises(DataError, match=r"images\.jsonl, line 1: .*'photos', .*--multimodal-keys"):
        source(path, multimodal_keys=(("image", "photos"),))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.jsonl", ("a.jsonl", 0, None)),
        ("a.jsonl@[:]", ("a.jsonl", 0, None)),
        ("a.jsonl@[3:]", ("a.jsonl", 3, None)),
        ("data/*.jsonl@[:7]", ("data/*.jsonl", 0, 7)),
        ("a@b.jsonl@[3:7]", ("a@b.jsonl", 3, 7)),
    ],
)
def test_a_slice_follows_the_path(text, wanted):
    assert PromptPath.read(Path(text)) == PromptPath(Path(wanted[0]), *wanted[1:])


@pytest.mark.parametrize("text", ["a.jsonl@[-3:]", "a.jsonl@[:-1]", "a.jsonl@[7:7]", "a.jsonl@[:0]"])
def test_a_slice_that_holds_nothing_or_counts_from_the_end_is_refused(text):
    with pytest.raises(DataError, match=re.escape(f"{text}: ")):
        PromptPath.read(Path(text))


def test_files_of_a_pattern_come_by_name_and_others_are_refused(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in PromptPath.read(tmp_path / "*.jsonl").files()] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match=r"\*\.csv "):
        PromptPath.read(tmp_path / "*.csv").files()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty .*\.jsonl, \.ndjson"):
        source(tmp_path / "empty")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("*", ["a.jsonl", "b.jsonl", "c.parquet", "part-0"]),
        ("[ab]*", ["a.jsonl", "b.jsonl"]),
        ("*.txt", ["notes.txt"]),
        ("_*.jsonl", ["_draft.jsonl"]),
        (".*.jsonl", [".hidden.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "more/d.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "c.parquet", "more/d.jsonl", "part-0"]),
        ("a**.jsonl", ["a.jsonl"]),
        ("*/d.jsonl", ["link/d.jsonl", "more/d.jsonl"]),
        ("_cache/*", ["_cache/e.jsonl"]),
        ("_*/*", ["_cache/e.jsonl"]),
    ],
)
def test_a_pattern_means_what_a_reader_would_take_it_for(tmp_path, pattern, wanted):
    names = ("a.jsonl", "b.jsonl", "c.parquet", "part-0", "notes.txt", "README.md", "_draft.jsonl", ".hidden.jsonl")
    (tmp_path / "more").mkdir()
    (tmp_path / "_cache").mkdir()
    (tmp_path / ".git").mkdir()
    for name in (*names, "more/d.jsonl", "_cache/e.jsonl", ".git/f.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "more" / "up").symlink_to(tmp_path)
    (tmp_path / "more" / "up too").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "more")
    assert [
        str(file.relative_to(tmp_path)) for file in PromptPath.read(tmp_path / pattern).files(["parquet"])
    ] == wanted


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl .*pipe"):
        source(tmp_path / "rows.jsonl")


def test_a_relative_pattern_and_a_link_to_a_file_are_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert PromptPath.read(Path("*.jsonl")).files() == [Path("a.jsonl"), Path("b.jsonl")]


# --- Lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
@pytest.mark.parametrize("end", ["", "\n"])
def test_every_line_is_found_by_its_number(tmp_path, lines, end):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(f'{{"n": {n}}}' for n in range(lines)) + (end if lines else ""))
    table = LineTable(path)
    assert table.total() == lines
    assert [raw.content.strip() for raw in table.read(0, lines)] == [f'{{"n": {n}}}'.encode() for n in range(lines)]
    for n in range(0, lines, 7):
        (raw,) = table.read(n, n + 1)
        assert raw.content.strip() == f'{{"n": {n}}}'.encode()


def test_a_start_in_order_reads_the_beginning_of_a_file_only(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n" * 700)
    where, tables = open_tables(tmp_path / "rows.jsonl", {})
    (table,) = tables
    assert isinstance(table, LineTable)
    next(rows_in_order(where, tables))
    assert table.index.frontier[0] == EVERY


@pytest.mark.parametrize(("start", "stop"), [(0, 700), (299, 302), (300, 600), (601, None), (899, 900), (900, None)])
def test_a_slice_reaches_over_files(tmp_path, start, stop):
    for file in range(3):
        (tmp_path / f"{file}.jsonl").write_text("".join(f"{300 * file + row}\n" for row in range(300)))
    where, tables = open_tables(Path(f"{tmp_path}/*.jsonl@[{start}:{stop or ''}]"), {})
    found = [int(raw.line) for raw in rows_in_order(where, tables)]
    assert found == list(range(900))[start:stop]
