"""Rows that cannot be read and are left out: three are reported, the first thousand are written to a file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core import PromptRequest, RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.requests import BadRows, PromptLengths, RunFilter
from slime_core.prompts.row_checks import RowChecks, refuse_unknown


def test_three_bad_rows_are_reported_and_the_file_holds_the_first_thousand_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "bad-rows.log"
    bad = BadRows(path)
    for line in range(1, 1201):
        bad.add(f"a.jsonl, line {line}: not\nJSON{'!' * 600}")
    *rows, last = bad.news()
    assert rows == [f"a.jsonl, line {line}: not JSON{'!' * 600}"[:500] for line in (1, 2, 3)]
    assert re.search(rf"1197 .*1,000 .*{path}$", last)
    assert bad.news() == []
    lines = path.read_text().splitlines()
    assert (len(lines), max(map(len, lines)), lines[999][:20]) == (1000, 500, "a.jsonl, line 1000: ")
    again = BadRows(path)
    again.add(f"a.jsonl, line 7: not JSON{'!' * 600}")
    assert (len(again.news()), path.read_text().splitlines()) == (1, lines)


def test_without_a_file_nothing_is_written() -> None:
    bad = BadRows()
    for line in range(5):
        bad.add(f"line {line}")
    assert bad.news() == ["line 0", "line 1", "line 2", "and 2 more"]


def test_every_row_that_is_skipped_is_explained_once_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\njunk\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    left_out = RunFilter(bad_rows=tmp_path / "bad-rows.log")
    request = PromptRequest(path, label_key=None, skips_bad=True, filter=left_out)
    found = [group[0].prompt for group in PromptFiles(None, RunView(prompts=request)).next_groups(6)]
    assert sorted(found) == ["a", "a", "a", "b", "b", "b"]
    (report,) = left_out.news()
    first, *others = report.split("\n")
    assert first.startswith("2 ")
    assert "--on-bad-data skip" in first
    logged = (tmp_path / "bad-rows.log").read_text().splitlines()
    for lines in (logged, [line.removeprefix("  ") for line in others]):
        assert sorted(line[: len(str(path)) + 8] for line in lines) == [f"{path}, line {line}" for line in (2, 4)]


OFFERED = {"rm_type": {"math": ""}}


def mistakes(metadata):
    if metadata.get("level") == "hard":
        yield "metadata level = 'hard' is too hard"


NAMING = [
    ({"rm_type": "maths"}, "metadata rm_type = 'maths' "),
    ({"level": "hard"}, "metadata level = 'hard' "),
    ({"sampling_params": {"temperature": 2}}, "metadata sampling_params: temperature = 2.0, "),
]


@pytest.mark.parametrize(("metadata", "message"), NAMING, ids=str)
def test_a_row_that_names_what_the_run_has_not_is_a_bad_row_wherever_it_stands(
    tmp_path: Path, metadata: dict, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "metadata": {"rm_type": "math", "level": "easy"}}
    rows = [*[good] * 60, {"prompt": "b", "metadata": metadata}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    checks = RowChecks(OFFERED, {"temperature": 1.0}, mistakes)
    left_out = RunFilter(checks, bad_rows=tmp_path / "bad-rows.log")
    request = PromptRequest(path, label_key=None, filter=left_out)
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}, line 61: {message}')}"):
        PromptFiles(None, RunView(prompts=request)).next_groups(61)
    skipping = PromptFiles(None, RunView(prompts=replace(request, skips_bad=True))).next_groups(61)
    assert [group[0].prompt for group in skipping] == ["a"] * 61
    assert left_out.metrics() == {"data/left_out/bad": 1.0}
    assert (tmp_path / "bad-rows.log").read_text().startswith(f"{path}, line 61: {message}")


REFUSING = "{% for m in messages %}{{ raise_exception('no x') if 'x' in m.content else m.content }}{% endfor %}"


def refusing(longest: int | None = None) -> RunFilter:
    """Return the filter of a run whose chat template refuses prompts with an x."""
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=True)
    encoder.tokenizer.chat_template = REFUSING
    return RunFilter(encoder=encoder, lengths=PromptLengths(encoder), longest=longest)


@pytest.mark.parametrize("longest", [None, 8])
def test_a_prompt_that_the_template_refuses_late_is_a_bad_row(tmp_path: Path, longest: int | None) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*["1"] * 1000, "x", "2"]))
    chosen = refusing(longest)
    request = PromptRequest(path, label_key=None, shuffle=False, skips_bad=True, filter=chosen)
    groups = PromptFiles(None, RunView(prompts=request)).next_groups(1001)
    assert [group[0].prompt for group in groups] == [*["1"] * 1000, "2"]
    assert chosen.metrics() == {"data/left_out/bad": 1.0}
    failing = replace(request, skips_bad=False, filter=refusing(longest))
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}, line 1001: ')}"):
        PromptFiles(None, RunView(prompts=failing)).next_groups(1001)


def test_a_row_with_another_generate_function_is_not_rendered(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "metadata": {"generate_function": "mine"}}) + "\n")
    request = PromptRequest(path, label_key=None, filter=refusing())
    assert PromptFiles(None, RunView(prompts=request)).next_groups(1)[0][0].prompt == "x"


def test_a_row_activates_no_plugin_and_says_which_one_to_add() -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:3.*'f1'(.|\n)*--plugin rewards"):
        refuse_unknown({"rm_type": "f1"}, {"rm_type": {"exact_match": ""}}, where="train.jsonl:3")
