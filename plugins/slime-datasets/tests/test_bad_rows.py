"""Rows that cannot be read are explained once, however the file that holds them is read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, RunView
from slime_core.errors import DataError
from slime_core.prompts.requests import RunFilter
from slime_core.prompts.row_checks import RowChecks
from slime_datasets.options import DatasetsOptions
from slime_datasets.streams import PromptStreams

ORDERS: list[dict[str, Any]] = [
    {},
    {"streaming_data": True, "shuffle": False},
    {"streaming_data": True, "shuffle_window": 3},
    {"streaming_data": True},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def next_prompts(request: PromptRequest, order: dict[str, Any], n: int) -> list[Any]:
    options = {name: value for name, value in order.items() if name != "shuffle"}
    run = RunView(prompts=replace(request, shuffle=order.get("shuffle", True)))
    return [group[0].prompt for group in PromptStreams(DatasetsOptions(**options), run).next_groups(n)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_row_that_is_skipped_is_explained_once_with_file_and_line(tmp_path: Path, order: dict) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\njunk\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    left_out = RunFilter(bad_rows=tmp_path / "bad-rows.log")
    request = PromptRequest(path, label_key=None, skips_bad=True, filter=left_out)
    found = next_prompts(request, order, 6)
    assert sorted(found) == ["a", "a", "a", "b", "b", "b"]
    second, fourth = sorted((tmp_path / "bad-rows.log").read_text().splitlines())
    assert second.startswith(f"{path}, line 2, column 1: ")
    assert fourth.startswith(f"{path}, line 4: ")
    assert "'prompt'" in fourth
    (report,) = left_out.news()
    first, *others = report.split("\n")
    assert "--buffer-data" in first
    assert sorted(line[: len(str(path)) + 10] for line in others) == [f"  {path}, line {line}" for line in (2, 4)]


OFFERED = {"rm_type": {"math": ""}}


def mistakes(metadata):
    if metadata.get("level") == "hard":
        yield "metadata level = 'hard' is too hard"


NAMING = [
    ({"rm_type": "maths"}, "metadata rm_type = 'maths'"),
    ({"level": "hard"}, "metadata level = 'hard' is too hard"),
    ({"sampling_params": {"temperature": 2}}, "metadata sampling_params: temperature = 2.0"),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("metadata", "message"), NAMING, ids=str)
def test_a_row_that_names_what_the_run_has_not_is_a_bad_row_wherever_it_stands(
    tmp_path: Path, order: dict, metadata: dict, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "metadata": {"rm_type": "math", "level": "easy"}}
    rows = [*[good] * 60, {"prompt": "b", "metadata": metadata}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    checks = RowChecks(OFFERED, {"temperature": 1.0}, mistakes)
    left_out = RunFilter(checks, bad_rows=tmp_path / "bad-rows.log")
    request = PromptRequest(path, label_key=None, filter=left_out)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}, line 61: {message}')}"):
        next_prompts(request, order, 61)
    assert next_prompts(replace(request, skips_bad=True), order, 61) == ["a"] * 61
    assert left_out.metrics() == {"data/left_out/bad": 1.0}
    assert (tmp_path / "bad-rows.log").read_text().startswith(f"{path}, line 61: {message}")
