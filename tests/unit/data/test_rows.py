from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.data.rows import PromptRow, Reading, content_of, read_prompts
from slime_core.data.tables import open_rows
from slime_core.errors import DataError


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def prompts(path: Path, *, label_key: str | None = "label") -> list[PromptRow]:
    return read_prompts(path, Reading(label_key=label_key))


def read_rows(path: Path) -> list[tuple[int, dict]]:
    return [(raw.number, content_of(raw)) for raw in open_rows(path).read(0) if not raw.is_blank]


def test_rows_come_with_their_line_numbers_and_empty_lines_are_passed_over(tmp_path):
    path = write(tmp_path, '{"a": 1}', "", "   ", '{"a": 2}')
    assert read_rows(path) == [(1, {"a": 1}), (4, {"a": 2})]


def test_only_line_feeds_end_a_line(tmp_path):
    # JSON allows these characters inside strings; str.splitlines would cut there.
    text = "one\u2028two\u0085three"
    path = write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False), '{"prompt": "next"}')
    assert [(number, row["prompt"]) for number, row in read_rows(path)] == [(1, text), (2, "next")]


def test_windows_line_ends_are_line_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n{"a": 2}\r\n')
    assert read_rows(path) == [(1, {"a": 1}), (2, {"a": 2})]


def test_a_row_becomes_a_prompt_with_label_and_metadata(tmp_path):
    path = write(tmp_path, '{"prompt": "37+45", "label": "82", "metadata": {"carries": 1}, "more": 0}')
    assert prompts(path) == [PromptRow("37+45", "82", {"carries": 1})]


def test_fields_are_named_by_the_keys(tmp_path):
    path = write(tmp_path, '{"question": "q", "answer": "a", "about": {"kind": 1}}')
    found = read_prompts(path, Reading(input_key="question", label_key="answer", metadata_key="about"))
    assert found == [PromptRow("q", "a", {"kind": 1})]


@pytest.mark.parametrize(("label", "text"), [("42", '"42"'), ("42", "42"), ("[1, 2]", "[1, 2]"), (None, "null")])
def test_a_label_is_text_whatever_the_row_holds(tmp_path, label, text):
    (row,) = prompts(write(tmp_path, f'{{"prompt": "q", "label": {text}}}'))
    assert row.label == label


def test_without_a_label_key_rows_need_no_label(tmp_path):
    (row,) = prompts(write(tmp_path, '{"prompt": "q"}'), label_key=None)
    assert row == PromptRow("q")


def test_a_prompt_may_be_chat_messages(tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    (row,) = prompts(write(tmp_path, json.dumps({"prompt": messages, "label": "x"})))
    assert row.prompt == messages


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', r"line 2, column 12: not JSON"),
        ("[1]", r"line 2: found list, expected an object"),
        ('{"question": "q", "x": 1}', r"line 2: no field 'prompt', found question, x. .*--input-key"),
        ("{}", r"line 2: no field 'prompt', found none"),
        ('{"prompt": 5, "label": "x"}', r"line 2: field 'prompt' is neither text nor a list of messages"),
        ('{"prompt": [], "label": "x"}', r"line 2: field 'prompt' is neither"),
        ('{"prompt": [{"role": "user"}], "label": "x"}', r"line 2: field 'prompt' is neither"),
        ('{"prompt": "q"}', r"line 2: no field 'label', found prompt. .*--label-key"),
        ('{"prompt": "q", "label": "x", "metadata": 3}', r"line 2: field 'metadata' is int.*--metadata-key"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "good", "label": "x"}', line)
    with pytest.raises(DataError, match=rf"rows\.jsonl, {message}"):
        prompts(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist; accepted: a prompt file"):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(DataError, match=r"latin\.jsonl, line 1: not UTF-8 \(.*\)\. Name a JSON Lines file in UTF-8"):
        read_rows(tmp_path / "latin.jsonl")


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        prompts(write(tmp_path, "", " "))
