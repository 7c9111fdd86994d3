"""``slime report``: its page, figures and trace; ``slime samples``: the tokens of samples."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slime_core.errors import DataError
from slime_plots.coloured import advantages, coloured
from slime_plots.figures import distribution, sampled_rows, timeline
from slime_plots.report import main
from slime_plots.spans import Span, read_spans, trace_events, waits
from slime_plots.tokens import Tokens, read_tokens
from slime_plots.tokens import main as show

MODEL = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
METRICS = [
    {"step": 0, "rollout/raw_reward": 0.25, "train/loss": 0.5},
    {"step": 1, "rollout/raw_reward": 0.5, "train/loss": 0.25, "eval/sums": 0.9},
]
SAMPLE = {
    **{"group": 0, "index": 4, "prompt": "1+1", "response": "</script><b>", "label": "</script><img src=x>"},
    **{"reward": 1.0, "response_length": 3, "weight_versions": ["0", "1"], "weight_spans": [["0", 0, 1], ["1", 1, 2]]},
    **{"tokens": [3, 6, 4, 7, 7, 1], "loss_mask": [1, 1, 0], "rollout_log_probs": [-0.01, -1.0, 0.0]},
}
# The driver waits 2 s for a rollout, trains for 1 s, and so on; the learner has no span while the driver waits.
DRIVER = [("start", None, 0, 1), ("rollout", 0, 1, 2), ("train", 0, 3, 1), ("rollout", 1, 4, 2), ("train", 1, 6, 1)]
LEARNER = [("log_probs", 0, 3, 0.25), ("actor_train", 0, 3.25, 0.5), ("actor_train", 1, 6.25, 0.5)]
START = 1_764_000_000.0


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    write(folder / "metrics.jsonl", METRICS)
    debug = f"{tmp_path}/{{rollout_id}}-{{rank}}"
    (folder / "config.toml").write_text(f'[x]\nlr = 0.5\n[y]\nsave_debug_train_data = "{debug}"\n')
    write(folder / "samples" / "train-000001.jsonl", [SAMPLE])
    for process, spans in {"learner-0": LEARNER, "driver": DRIVER}.items():
        rows = [{"name": name, "step": step, "start": START + at, "seconds": long} for name, step, at, long in spans]
        write(folder / "timeline" / f"{process}.jsonl", rows)
    return folder


def parsed(page: Path) -> tuple[str, dict[str, Any]]:
    """The text of a page outside scripts and styles, and its figures by their id."""
    html, script = page.read_text(), r'<script[^>]*id="(figure-\d+)"[^>]*>(.*?)</script>'
    figures = {name: json.loads(data) for name, data in re.findall(script, html, re.DOTALL)}
    return unescape(re.sub(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>", "", html)), figures


def test_the_page_has_every_part_of_a_run_and_needs_no_network(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{"name": "core", "version": "0.1.0"}, {"name": "<grpo>", "version": "0.2.0"}]
    (run / "plugins.json").write_text(json.dumps({"plugins": entries}))
    with (run / "config.toml").open("a") as file:
        file.write('[model]\nhf_checkpoint = "models/small"\n[rollout]\nnum_rollout = 7\n')
    assert main([str(run), "--model", str(MODEL)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    (text, figures), page = parsed(run / "report.html"), (run / "report.html").read_text()
    titles = ("Rewards and evaluations", "train/ (1 metrics)", "Time of a step", "Timeline", "Samples")
    facts = ("models/small", "core 0.1.0, <grpo> 0.2.0", "lr0.5", "num_rollout7", "0:00:07")
    escaped = "label </script><img src=x>"
    assert [part for part in (*titles, *facts, escaped) if part not in text] == []
    assert figures
    assert all(f'data-figure="{name}"' in page for name in figures)
    assert "default-src 'none'" in page
    assert not re.search(r"<(img|link|iframe)\b|<script[^>]+src=", page)


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    write(tmp_path / "b" / "metrics.jsonl", [{"step": 0, "rollout/raw_reward": 0.75}])
    (tmp_path / "b" / "config.toml").write_text("[x]\nlr = 0.25\n")
    main([str(run), str(tmp_path / "b"), "--out", str(tmp_path / "compare.html")])
    text, figures = parsed(tmp_path / "compare.html")
    assert "lr0.50.25" in text
    rewards = [line for line in figures["figure-0"]["data"] if line["xaxis"] == "x"]
    assert {line["name"] for line in rewards} == {"a", "b"}


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"metrics.jsonl": ""}, "no metrics yet"),
        ({"metrics.jsonl": json.dumps(METRICS[0]) + '\n{"step": 1, "rollo', "config.toml": ""}, "unknown"),
    ],
    ids=["before its first row", "half a row"],
)
def test_a_run_in_progress_has_a_page(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main([str(tmp_path)]) == 0
    assert text in parsed(tmp_path / "report.html")[0]


def test_a_process_waits_for_what_the_driver_does_meanwhile(run: Path) -> None:
    # Free from 3.75 to 6.25: 0.25 s of the first training, the second rollout, 0.25 s of the second training.
    assert waits(read_spans(run)) == {"learner-0": {"start": 0.0, "rollout": 2.0, "train": 0.5}}


def test_overlapping_spans_count_once() -> None:
    sampler = [Span("a", 0, 1, 4), Span("b", 0, 2, 1), Span("c", 0, 6, 1)]
    assert waits({"driver": [Span("train", 0, 0, 10)], "sampler": sampler}) == {"sampler": {"train": 1.0}}


def test_the_timeline_shows_the_last_steps(run: Path) -> None:
    bars = {bar.name: (list(bar.base), list(bar.x), list(bar.y)) for bar in timeline(read_spans(run), steps=1).data}
    assert bars == {
        "rollout": ([0.0], [2.0], ["driver"]),
        "train": ([2.0], [1.0], ["driver"]),
        "actor_train": ([2.25], [0.5], ["learner-0"]),
    }
    all_bars = {bar.name for bar in timeline(read_spans(run), steps=2).data}
    assert all_bars == {"start", "rollout", "train", "log_probs", "actor_train"}


def test_the_trace_has_every_span_in_microseconds(run: Path, tmp_path: Path) -> None:
    main([str(run), "--trace", str(tmp_path / "trace.json")])
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == trace_events(read_spans(run))
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "driver", 2: "learner-0"}
    time_us = {"ts": 6_250_000, "dur": 500_000}
    event = {"ph": "X", "name": "actor_train", "cat": "slime", "pid": 2, "tid": 2, "args": {"step": 1}, **time_us}
    assert event in trace["traceEvents"]


@pytest.mark.parametrize("line", ["[]", '{"name": "train"}', "nonsense"])
def test_a_bad_span_is_named(run: Path, line: str) -> None:
    (run / "timeline" / "sampler.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"sampler\.jsonl:1"):
        main([str(run)])


def test_ranks_are_in_the_order_of_their_numbers(run: Path) -> None:
    for rank in (10, 2):
        (run / "timeline" / f"learner-{rank}.jsonl").touch()
    assert list(read_spans(run)) == ["driver", "learner-0", "learner-2", "learner-10"]


def test_a_column_of_a_distribution_has_the_shares_of_its_rollout() -> None:
    (heat,) = distribution("rewards", {3: [0.0, 1.0, 1.0, 1.0], 7: [0.0]}).data
    assert list(heat.x) == [3, 7]
    assert (heat.z[0][0], heat.z[-1][0]) == (0.25, 0.75)
    assert [sum(column) for column in zip(*heat.z, strict=True)] == [1.0, 1.0]


def test_few_of_many_rollouts_are_read_the_first_and_the_last_among_them(run: Path) -> None:
    for number in range(300):
        write(run / "samples" / f"train-{number:06d}.jsonl", [{"reward": 0.0}])
    read = [rollout for rollout, _ in sampled_rows(run)]
    assert (len(read), read[0], read[-1]) == (60, 0, 299)


def test_advantages_are_those_that_the_learner_trained(tmp_path: Path) -> None:
    """Of two ranks that hold parts of a response, as context parallelism distributes it."""
    nan = float("nan")
    for rank, values in enumerate([[1.5, nan, -2.0], [nan, 0.5, nan]]):
        columns = {"indices_B": np.array([4, 9]), "response_lengths_B": np.array([2, 1])}
        save_file({**columns, "trained/advantages_U": np.array(values, np.float32)}, tmp_path / f"3-{rank}")
    assert advantages(f"{tmp_path}/{{rollout_id}}-{{rank}}", 3) == {4: [1.5, 0.5], 9: [-2.0]}
    assert advantages(f"{tmp_path}/{{rollout_id}}-{{rank}}", 4) == {}


def test_a_token_has_its_numbers_and_a_colour_for_each_choice() -> None:
    tokens = Tokens("title", (3,), ((7, True, -1.0), (8, False, None)), 4, ("0", None))
    html = coloured(tokens, None, [-2.0, float("nan")], largest=2.0)
    first, second = re.findall(r"<span class=\"(?:masked)?\" [^>]*>", html)
    assert 'title="id 7 · log-prob -1 · advantage -2 · version 0"' in first
    assert re.search(r"--log-prob:#\w{6};--advantage:#ff6666;--version:#\w{6}", first)
    assert 'style="" title="id 8 · not trained"' in second


def test_a_page_that_cannot_be_written_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing/x\.html"):
        main([str(run), "--out", str(tmp_path / "missing" / "x.html")])


# --- slime samples ----------------------------------------------------------------------------------------------------

ROW = SAMPLE | {"group": 3, "index": 7, "label": "2", "reward": 0.0, "loss_mask": [1, 0, 1]}
ROW |= {"rollout_log_probs": [-0.01, -1.0, -9.0], "weight_versions": [], "weight_spans": None}


@pytest.fixture
def sampled(tmp_path: Path) -> Path:
    write(tmp_path / "samples" / "train-000001.jsonl", [{**ROW, "index": 0}])
    write(tmp_path / "samples" / "train-000002.jsonl", [ROW, {"group": 3}])
    return tmp_path


def test_a_token_has_the_colour_of_its_probability_and_one_that_does_not_train_is_grey(
    sampled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert show([str(sampled), "--model", str(MODEL)]) == 0
    printed = capsys.readouterr().out
    assert "group 3 index 7 reward 0.0 label 2" in printed
    prompt, grey = "\x1b[36m<|user|>1<|assistant|>\x1b[0m", "\x1b[38;5;244;48;5;235m2\x1b[0m"
    assert f"{prompt}\x1b[32m2\x1b[0m{grey}\x1b[31m<eos>" in printed


def test_without_colours_each_token_has_a_line(sampled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([str(sampled)]) == 0  # it has no checkpoint, so no tokenizer
    lines = capsys.readouterr().out.splitlines()
    assert list(map(str.split, lines[-3:])) == [
        ["3", "7", "7", "1", "-0.0100"],
        ["4", "7", "7", "0", "-1.0000"],
        ["5", "1", "1", "1", "-9.0000"],
    ]
    assert ["0", "3", "3", "prompt"] in map(str.split, lines)


def test_a_file_gives_the_samples_that_hold_tokens(sampled: Path) -> None:
    response = ((7, True, -0.01), (7, False, -1.0), (1, True, -9.0))
    expected = Tokens("group 3 index 7 reward 0.0 label 2", (3, 6, 4), response, 7)
    assert list(read_tokens(sampled / "samples" / "train-000002.jsonl")) == [expected]


@pytest.mark.parametrize(
    ("fields", "versions"),
    [
        ({"weight_versions": ["5"]}, ("5", "5", "5")),
        ({"weight_versions": ["5", "6"], "weight_spans": [["5", 0, 1], ["6", 2, 3]]}, ("5", None, "6")),
        ({"weight_versions": []}, ()),
    ],
)
def test_a_token_has_the_version_that_sampled_it(tmp_path: Path, fields: dict[str, object], versions: object) -> None:
    (tmp_path / "train-000000.jsonl").write_text(json.dumps(ROW | fields))
    assert [tokens.versions for tokens in read_tokens(tmp_path / "train-000000.jsonl")] == [versions]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"group": 1}', "--num-token-samples 8"), ("no json", "train-000000"), ('{"tokens": [1]}', "train-000000")],
)
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train-000000.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_tokens(tmp_path / "train-000000.jsonl"))


def test_a_folder_without_samples_and_a_file_that_is_no_tokenizer_are_refused(sampled: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples/\*\.jsonl"):
        show([str(sampled / "samples")])
    with pytest.raises(DataError, match="--model"):
        show([str(sampled), "--model", str(tmp_path)])
