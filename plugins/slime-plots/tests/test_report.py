"""The page of ``slime report``: what is in it, what its figures hold, and the trace of the timeline."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
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
from slime_plots.tokens import Tokens

MODEL = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
METRICS = [
    {"step": 0, "rollout/raw_reward": 0.25, "train/loss": 0.5},
    {"step": 1, "rollout/raw_reward": 0.5, "train/loss": 0.25, "eval/sums": 0.9},
]
SAMPLE = {
    "group": 0,
    "index": 4,
    "prompt": "1+1",
    "response": "</script><b>",
    "label": "</script><img src=x>",
    "reward": 1.0,
    "response_length": 3,
    "weight_versions": ["0", "1"],
    "weight_spans": [["0", 0, 1], ["1", 1, 2]],
    "tokens": [3, 6, 4, 7, 7, 1],
    "loss_mask": [1, 1, 0],
    "rollout_log_probs": [-0.01, -1.0, 0.0],
}
# The driver waits 2 s for a rollout, trains for 1 s, and so on; the learner has no span while the driver waits.
DRIVER = [("start", None, 0, 1), ("rollout", 0, 1, 2), ("train", 0, 3, 1), ("rollout", 1, 4, 2), ("train", 1, 6, 1)]
LEARNER = [("log_probs", 0, 3, 0.25), ("actor_train", 0, 3.25, 0.5), ("actor_train", 1, 6.25, 0.5)]
START = 1_764_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    for name in ("samples", "timeline"):
        (folder / name).mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / "config.toml").write_text(
        f'[x]\nlr = 0.5\n[y]\nsave_debug_train_data = "{tmp_path}/{{rollout_id}}-{{rank}}"\n'
    )
    (folder / "samples" / "train-000001.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    for process, spans in {"learner-0": LEARNER, "driver": DRIVER}.items():
        rows = [{"name": name, "step": step, "start": START + at, "seconds": long} for name, step, at, long in spans]
        (folder / "timeline" / f"{process}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Elements(HTMLParser):
    """The tags of a page, the figures by their id, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.figures: dict[str, Any] = {}
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside.startswith("figure-"):
            self.figures[self._inside] = json.loads(data)
        elif not self._inside:
            self.text += data


def test_the_page_has_every_part_of_a_run_and_needs_no_network(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--model", str(MODEL)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    found = Elements(page)
    for title in (
        "Rewards and evaluations",
        "train/ (1 metrics)",
        "Where the time of a step goes",
        "Timeline",
        "Samples",
    ):
        assert title in found.text
    assert all(f'data-figure="{name}"' in page for name in found.figures)
    assert not {"img", "link", "iframe"} & {*found.tags}
    assert "default-src 'none'" in page
    assert not re.search(r"<script[^>]+src=", page)


def test_the_page_of_one_run_shows_model_plugins_settings_and_duration(run: Path) -> None:
    entries = [{"plugin": "core", "version": "0.1.0"}, {"plugin": "<grpo>", "version": "0.2.0"}]
    (run / "plugins.json").write_text(json.dumps({"plugins": entries}))
    with (run / "config.toml").open("a") as file:
        file.write('[model]\nhf_checkpoint = "models/small"\n[rollout]\nnum_rollout = 7\n')
    assert main([str(run)]) == 0
    text = Elements((run / "report.html").read_text()).text
    assert "models/small" in text
    assert "core 0.1.0, <grpo> 0.2.0" in text
    assert "lr0.5" in text
    assert "num_rollout7" in text
    assert "0:00:07" in text


def test_a_run_without_timeline_and_plugins_has_a_page(run: Path) -> None:
    for file in (run / "timeline").iterdir():
        file.unlink()
    assert main([str(run)]) == 0
    assert "unknown" in Elements((run / "report.html").read_text()).text


def test_text_of_models_and_data_is_escaped(run: Path) -> None:
    main([str(run)])
    found = Elements((run / "report.html").read_text())
    assert "label </script><img src=x>" in found.text


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.mkdir()
    (other / "metrics.jsonl").write_text(json.dumps({"step": 0, "rollout/raw_reward": 0.75}) + "\n")
    (other / "config.toml").write_text("[x]\nlr = 0.25\n")
    out = tmp_path / "compare.html"
    main([str(run), str(other), "--out", str(out)])
    found = Elements(out.read_text())
    assert "lr0.50.25" in found.text
    rewards = [line for line in found.figures["figure-0"]["data"] if line["xaxis"] == "x"]
    assert {line["name"] for line in rewards} == {"a", "b"}


def test_a_run_in_progress_has_a_page(tmp_path: Path) -> None:
    """Before its first sample and its first span, with half a row written."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS[0]) + '\n{"step": 1, "rollo')
    (tmp_path / "config.toml").write_text("")
    assert main([str(tmp_path)]) == 0


def test_a_run_before_its_first_row_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main([str(tmp_path)]) == 0
    assert "no metrics yet" in (tmp_path / "report.html").read_text()


def test_a_process_waits_for_what_the_driver_does_meanwhile(run: Path) -> None:
    # Free from 3.75 to 6.25: 0.25 s of the first training, the second rollout, 0.25 s of the second training.
    assert waits(read_spans(run)) == {"learner-0": {"start": 0.0, "rollout": 2.0, "train": 0.5}}


def test_overlapping_spans_count_once() -> None:
    spans = {
        "driver": [Span("train", 0, 0, 10)],
        "sampler": [Span("a", 0, 1, 4), Span("b", 0, 2, 1), Span("c", 0, 6, 1)],
    }
    assert waits(spans) == {"sampler": {"train": 1.0}}


def test_the_timeline_shows_the_last_steps(run: Path) -> None:
    bars = {bar.name: (list(bar.base), list(bar.x), list(bar.y)) for bar in timeline(read_spans(run), steps=1).data}
    assert bars == {
        "rollout": ([0.0], [2.0], ["driver"]),
        "train": ([2.0], [1.0], ["driver"]),
        "actor_train": ([2.25], [0.5], ["learner-0"]),
    }
    assert {bar.name for bar in timeline(read_spans(run), steps=2).data} == {
        "start",
        "rollout",
        "train",
        "log_probs",
        "actor_train",
    }


def test_the_trace_has_every_span_in_microseconds(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    main([str(run), "--trace", str(file)])
    trace = json.loads(file.read_text())
    assert trace == trace_events(read_spans(run))
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "driver", 2: "learner-0"}
    assert {"ph": "X", "name": "actor_train", "cat": "slime", "ts": 6_250_000, "dur": 500_000, "pid": 2, "tid": 2,
            "args": {"step": 1}} in trace["traceEvents"]  # fmt: skip


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
        (run / "samples" / f"train-{number:06d}.jsonl").write_text(json.dumps({"reward": 0.0}) + "\n")
    read = [rollout for rollout, _ in sampled_rows(run)]
    assert (len(read), read[0], read[-1]) == (60, 0, 299)


def test_advantages_are_those_that_the_learner_trained(tmp_path: Path) -> None:
    """Of two ranks that hold parts of a response, as context parallelism distributes it."""
    nan = float("nan")
    for rank, values in enumerate([[1.5, nan, -2.0], [nan, 0.5, nan]]):
        columns = {
            "indices_B": np.array([4, 9]),
            "response_lengths_B": np.array([2, 1]),
            "trained/advantages_U": np.array(values, np.float32),
        }
        save_file(columns, tmp_path / f"3-{rank}")
    assert advantages(f"{tmp_path}/{{rollout_id}}-{{rank}}", 3) == {4: [1.5, 0.5], 9: [-2.0]}
    assert advantages(f"{tmp_path}/{{rollout_id}}-{{rank}}", 4) == {}


def test_a_token_has_its_numbers_and_a_colour_for_each_choice() -> None:
    one = Tokens("title", (3,), ((7, True, -1.0), (8, False, None)), 4, ("0", None))
    html = coloured(one, None, [-2.0, float("nan")], largest=2.0)
    first, second = re.findall(r"<span class=\"(?:masked)?\" [^>]*>", html)
    assert 'title="id 7 · log-prob -1 · advantage -2 · version 0"' in first
    assert re.search(r"--log-prob:#\w{6};--advantage:#ff6666;--version:#\w{6}", first)
    assert 'style="" title="id 8 · not trained"' in second


def test_a_page_that_cannot_be_written_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        main([str(run), "--out", str(tmp_path / "missing" / "x.html")])
