"""Rows of prompt files: what a path names, where lines start, and what a row holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.provisional import PromptRequest, PromptRow
from slime_datasets.formats import open_rows
from slime_datasets.lines import EVERY, LineTable
from slime_datasets.options import DatasetsOptions
from slime_datasets.paths import PromptPath
from slime_datasets.prompt_files import PromptFiles
from slime_datasets.rows import content_of, prompts_of


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def prompts(path: Path, **fields: Any) -> list[PromptRow]:
    return [row for _, row in prompts_of(PromptRequest(path, **fields))]


def read_rows(path: Path) -> list[tuple[int, dict]]:
    return [(raw.number, content_of(raw)) for raw in open_rows(path).read() if not raw.is_blank]


def test_rows_come_with_their_line_numbers_and_empty_lines_are_passed_over(tmp_path):
    path = write(tmp_path, '{"a": 1}', "", "   ", '{"a": 2}')
    assert read_rows(path) == [(1, {"a": 1}), (4, {"a": 2})]


def test_only_line_feeds_end_a_line(tmp_path):
    # JSON allows these characters inside strings; str.splitlines would cut there.
    text = "one\u2028two\u0085three"
    path = write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False), '{"prompt": "next"}')
    assert [(number, row["prompt"]) for number, row in read_rows(path)] == [(1, text), (2, "next")]


@pytest.mark.parametrize(("label", "text"), [("42", '"42"'), ("42", "42"), ("[1, 2]", "[1, 2]"), (None, "null")])
def test_a_label_is_text_whatever_the_row_holds(tmp_path, label, text):
    (row,) = prompts(write(tmp_path, f'{{"prompt": "q", "label": {text}}}'))
    assert row.label == label


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"prompt": ', ", column 12: "),
        ('{"prompt": "1+1"', ", column 17: .*','"),
        ("[1]", ": found list"),
        ('{"question": "q", "x": 1}', ": .*'prompt'.*question, x.*--input-key"),
        ("{}", ": .*'prompt' "),
        ('{"prompt": [], "label": "x"}', ": field 'prompt' "),
        ('{"prompt": " \\n", "label": "x"}', ": .*'prompt' is empty"),
        ('{"prompt": [{"role": "user", "content": []}], "label": "x"}', ": .*'prompt' is empty"),
        ('{"prompt": [{"role": 7, "content": "q"}], "label": "x"}', ": field 'prompt' "),
        ('{"prompt": [{"role": "user", "content": 5}], "label": "x"}', ": field 'prompt' "),
        ('{"prompt": "q"}', ": .*'label'.*--label-key none"),
        ('{"prompt": "q", "label": "x", "metadata": 3}', ": field 'metadata' is int.*--metadata-key"),
        ('{"prompt": "q", "label": "x", "tools": [1]}', ": field 'tools' "),
        (json.dumps({"prompt": "q", "label": "x", "tools": "[" * 100_000}), ": field 'tools' "),
        (json.dumps({"prompt": "q", "label": "x", "tools": "[1"}), ": field 'tools' "),
        (f'{{"prompt": "q", "label": {"[" * 100_000}', ": .*recursion"),
        (f'{{"prompt": "q", "label": {"9" * 5000}}}', ": .*4300 digits"),
        (r'{"prompt": "a\ud800b", "label": "x"}', ": .*utf-8"),
        ('{"prompt": "q", "label": NaN}', ": field 'label' holds nan"),
        ('{"prompt": "q", "label": 1e999}', ": field 'label' holds inf"),
    ],
    ids=lambda value: value[:60],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, line, names):
    path = write(tmp_path, '{"prompt": "good", "label": "x"}', line)
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2{names}"):
        prompts(path, tool_key="tools")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl "):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(DataError, match=r"latin\.jsonl, line 1: .*0xe9"):
        read_rows(tmp_path / "latin.jsonl")


def test_a_conversation_may_hold_an_empty_message(tmp_path):
    system, called = {"role": "system", "content": ""}, {"role": "assistant", "content": None, "tool_calls": [{}]}
    for prompt in ([system, {"role": "user", "content": "q"}], [{"role": "user", "content": ""}, called]):
        (row,) = prompts(write(tmp_path, json.dumps({"prompt": prompt, "label": "x"})))
        assert row.prompt == prompt


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b\x08\x00\x00", b"PAR1\x15\x04", b'[{"prompt": "q"}]', b'[\n{"prompt": "q"}\n]']
)
def test_files_of_other_forms_are_refused_with_what_to_do(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}, line 1.*\.parquet"):
        prompts(path)


def test_a_slice_beyond_the_last_row_reports_the_number_of_rows(tmp_path):
    path = write(tmp_path, '{"prompt": "q", "label": "x"}')
    with pytest.raises(DataError, match=r"@\[7:9\]: .* row 7, .* 1 rows"):
        prompts(Path(f"{path}@[7:9]"))


@pytest.mark.parametrize("slice_", ["[0:9:2]", "[5]", "[a:b]", "[]", ""])
def test_a_malformed_slice_of_a_path_is_named(tmp_path, slice_):
    path = write(tmp_path, '{"prompt": "q", "label": "x"}')
    with pytest.raises(DataError, match=r"@\[a:b\] with 0 <= a < b"):
        prompts(Path(f"{path}@{slice_}"))


VERL = {
    "prompt": [{"role": "user", "content": "How many clips?"}],
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"question": "How many?", "tools.all": [{"name": "add"}], "about": {"level": 1}},
    "final_answer": ["3", "4"],
    "as.text": '{"label": "5", "more": "[6, 7]"}',
    "reward_model.style": "a name with a dot",
    "answer": None,
    "images": {"first": "a.png"},
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"label_key": "reward_model.ground_truth"}, PromptRow(VERL["prompt"], "72")),
        ({"label_key": "reward_model.style"}, PromptRow(VERL["prompt"], "a name with a dot")),
        ({"label_key": "final_answer.1"}, PromptRow(VERL["prompt"], "4")),
        ({"label_key": "as.text.label"}, PromptRow(VERL["prompt"], "5")),
        ({"label_key": "answer.value"}, PromptRow(VERL["prompt"])),
        ({"label_key": None, "metadata_key": "extra_info.about"}, PromptRow(VERL["prompt"], metadata={"level": 1})),
        (
            {"label_key": None, "metadata_key": "as.text"},
            PromptRow(VERL["prompt"], metadata=json.loads(VERL["as.text"])),
        ),
        (
            {"label_key": None, "tool_key": "extra_info.tools.all"},
            PromptRow(VERL["prompt"], metadata={"tools": [{"name": "add"}]}),
        ),
        (
            {"label_key": None, "multimodal_keys": (("image", "images.first"),)},
            PromptRow(VERL["prompt"], inputs={"image": "a.png"}),
        ),
    ],
    ids=str,
)
def test_a_key_may_be_a_path_into_a_field_and_a_field_of_that_name_wins(tmp_path, keys, expected):
    assert prompts(write(tmp_path, json.dumps(VERL)), **keys) == [expected]


@pytest.mark.parametrize("key", ["reward_model.truth", "final_answer.2", "final_answer.-1", "prompt.role", "answer2.x"])
def test_a_path_that_leads_nowhere_is_refused_with_the_paths_that_there_are(tmp_path, key):
    with pytest.raises(DataError, match=rf"line 1: .*'{key}'.*reward_model"):
        prompts(write(tmp_path, json.dumps(VERL)), label_key=key)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', (1, 2)),
        (b'\xef\xbb\xbf\n{"a": 1}\n{"a": 2}', (2, 3)),
        (b'{"a": 1}\r\n{"a": 2}\r\n', (1, 2)),
    ],
    ids=["byte order mark", "byte order mark alone", "Windows"],
)
def test_marks_and_line_ends_of_other_systems_are_read(tmp_path, content, lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert read_rows(path) == [(line, {"a": number}) for number, line in enumerate(lines, 1)]


def source(path: Path, **request: Any) -> PromptFiles:
    return PromptFiles(DatasetsOptions(), RunView(prompts=PromptRequest(path, **{"label_key": None, **request})))


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
    assert [str(file.relative_to(tmp_path)) for file in PromptPath.read(tmp_path / pattern).files()] == wanted


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl "):
        source(tmp_path / "rows.jsonl")


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


@pytest.mark.parametrize(("start", "stop"), [(0, 700), (299, 302), (300, 600), (601, None), (899, 900), (900, None)])
def test_a_slice_reaches_over_files(tmp_path, start, stop):
    for file in range(3):
        (tmp_path / f"{file}.jsonl").write_text("".join(f"{300 * file + row}\n" for row in range(300)))
    found = [int(raw.line) for raw in open_rows(Path(f"{tmp_path}/*.jsonl@[{start}:{stop or ''}]")).read()]
    assert found == list(range(900))[start:stop]


def test_images_and_the_like_come_as_they_stand(tmp_path):
    path = tmp_path / "images.jsonl"
    path.write_text('{"prompt": "a", "pictures": ["x.png"]}\n{"prompt": "b", "pictures": null}\n')
    first, second = source(path, shuffle=False, multimodal_keys=(("image", "pictures"),)).next_groups(2)
    assert (first[0].multimodal_inputs, second[0].multimodal_inputs) == ({"image": ["x.png"]}, None)
    with pytest.raises(DataError, match=r"images\.jsonl, line 1: .*'photos'.*--multimodal-keys"):
        source(path, multimodal_keys=(("image", "photos"),))


def test_a_relative_pattern_and_a_link_to_a_file_are_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert PromptPath.read(Path("*.jsonl")).files() == [Path("a.jsonl"), Path("b.jsonl")]


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        prompts(write(tmp_path, "", " "))


def test_no_text_is_no_tools(tmp_path):
    path = write(tmp_path, '{"prompt": "q", "tools": " "}')
    assert prompts(path, label_key=None, tool_key="tools") == [PromptRow("q")]
