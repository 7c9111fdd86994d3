"""Rows that are left out: which, how they are reported, and what a row may ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError, RunError
from slime_core.prompts.chat import PromptEncoder
from slime_core.provisional import PromptRequest
from slime_core.rollout.prompt_filter import CHUNK, BadRows, PromptLengths, RunFilter
from slime_core.rollout.row_checks import RowChecks, own_sampling
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles


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
        PromptFiles(DatasetsOptions(), RunView(prompts=request)).next_groups(61)
    skipping = PromptFiles(DatasetsOptions(), RunView(prompts=replace(request, skips_bad=True))).next_groups(61)
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
    groups = PromptFiles(DatasetsOptions(), RunView(prompts=request)).next_groups(1001)
    assert [group[0].prompt for group in groups] == [*["1"] * 1000, "2"]
    assert chosen.metrics() == {"data/left_out/bad": 1.0}
    failing = replace(request, skips_bad=False, filter=refusing(longest))
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}, line 1001: ')}"):
        PromptFiles(DatasetsOptions(), RunView(prompts=failing)).next_groups(1001)


OF_RUN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def own(requested: Any, *, of_run: dict[str, float] | None = None) -> dict[str, Any]:
    return own_sampling({"sampling_params": requested}, of_run=of_run, where="x.jsonl, line 3")


def test_a_row_says_what_it_wants_and_one_without_says_nothing() -> None:
    read = own({"stop": "X", "max_new_tokens": 4, "stop_token_ids": 7})
    assert read == {"stop": ("X",), "max_new_tokens": 4, "stop_token_ids": (7,)}
    assert own({"temperature": 0, "json_schema": "{}"}) == {"temperature": 0.0, "json_schema": "{}"}
    assert own_sampling({"carries": 1}, of_run=OF_RUN, where="") == own(None, of_run=OF_RUN) == {}
    assert own({"temperature": 1.0, "top_k": -1}, of_run=OF_RUN) == {"temperature": 1.0, "top_k": -1}


@pytest.mark.parametrize(
    ("requested", "found", "in_evaluation"),
    [
        ("greedy", "found 'greedy'", False),
        ({"max_tokens": 4}, "max_tokens = 4: ", False),
        ({"top_p": 2}, "top_p = 2: ", False),
        ({"stop": [""]}, r"stop = \[''\]: ", False),
        ({"temperature": 0.7}, "temperature = 0.7, .* 1.", True),
        ({"top_p": 0.9}, "top_p = 0.9, .* 1.", True),
        ({"repetition_penalty": 1.0}, "repetition_penalty = 1.0 ", True),
    ],
)
def test_wrong_sampling_params_and_another_distribution_in_training_are_refused(
    requested: Any, found: str, in_evaluation: bool
) -> None:
    for of_run in (OF_RUN,) if in_evaluation else (OF_RUN, None):
        with pytest.raises(DataError, match=rf"^x\.jsonl, line 3: metadata sampling_params: {found}"):
            own(requested, of_run=of_run)
    assert not in_evaluation or own(requested)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)


@pytest.fixture(scope="module")
def lengths(encoder: PromptEncoder) -> Iterator[PromptLengths]:
    made = PromptLengths(encoder, num_workers=2)
    yield made
    made.close()


def test_prompts_are_counted_in_order_by_several_processes(lengths, encoder):
    prompts = [("1" * (n % 7 + 1), None) for n in range(3 * CHUNK + 5)]
    assert lengths(prompts) == [len(encoder.encode(prompt)) for prompt, _ in prompts]
    assert len(lengths._workers) == 2
    assert lengths([]) == []


def test_a_prompt_that_cannot_be_counted_raises_here_and_the_process_continues(lengths):
    with pytest.raises(DataError, match="--apply-chat-template"):
        lengths([([{"role": "user", "content": "1"}], None)])
    assert lengths([("11", None)]) == [2]


def test_a_process_that_died_is_an_error_with_a_way_out(encoder):
    lengths = PromptLengths(encoder, num_workers=1)
    lengths([("1", None)])
    lengths._workers[0]._process.kill()
    with pytest.raises(RunError, match=r"exit code -9.*--num-data-workers 0"):
        lengths([("1", None)])
    lengths.close()


def test_left_out_prompts_are_reported_each_time_their_count_doubles():
    left_out = RunFilter()
    left_out.count_left_out("too_long", 3)
    (first,) = left_out.news()
    assert re.match("3 .*--rollout-max-prompt-len", first)
    left_out.count_left_out("too_long", 3)
    assert left_out.news() == []
    left_out.count_left_out("too_long", 1)
    left_out.count_left_out("bad", 1)
    bad, long = left_out.news()
    assert re.match("1 .*--on-bad-data skip", bad)
    assert re.match("7 .*--rollout-max-prompt-len", long)
    assert left_out.metrics() == {"data/left_out/bad": 1.0, "data/left_out/too_long": 7.0}
