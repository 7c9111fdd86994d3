"""Charts of runs: which metrics are selected, and how they are plotted in a terminal and in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slime_core import RunView
from slime_core.errors import DataError
from slime_plots.command import main
from slime_plots.curves import MAX_CHARTS, Chart, charts, read
from slime_plots.draw import as_text, save
from slime_plots.tracker import Plots
from slime_testing import TrackerSuite

ROWS = [
    {"step": 0, "rollout/raw_reward": 0.25, "train/loss": 0.5, "eval/sums": 0.4, "eval/sums-truncated_ratio": 0.0},
    {"step": 1, "rollout/raw_reward": 0.5, "train/loss": 0.25, "eval/weight_version": 1},
    {"step": 2, "eval/sums": 0.9, "eval/sums/digits=1": 0.8, "eval/sums-pass@1": 0.9},
]
CHART = Chart("m", {"a": [(0, 1.0)]})


class TestTracker(TrackerSuite):
    component = "plots"


def run(folder: Path, rows: list[Mapping[str, float]] = ROWS, *, last_line: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + last_line)
    return folder


def test_the_default_is_the_reward_and_one_score_for_each_evaluation_set(tmp_path: Path) -> None:
    assert charts({"a": read(run(tmp_path / "a"))}) == [
        Chart("rollout/raw_reward", {"a": [(0, 0.25), (1, 0.5)]}),
        Chart("eval/sums", {"a": [(0, 0.4), (2, 0.9)]}),
    ]


def test_runs_share_the_chart_of_a_metric_and_a_line_in_progress_is_left_out(tmp_path: Path) -> None:
    first = run(tmp_path / "a", last_line='{"step": 3, "train/lo')
    runs = {"a": read(first), "b": read(run(tmp_path / "b", [{"step": 3, "train/loss": 2.0}]))}
    assert charts(runs, ["train/*"]) == [Chart("train/loss", {"a": [(0, 0.5), (1, 0.25)], "b": [(3, 2.0)]})]


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": "x"}', '{"step": 1, "a": null}', "nonsense", "[" * 100_000])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl:4"):
        read(run(tmp_path / "a", last_line=line + "\n"))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda folder: charts({"a": read(run(folder / "a"))}, ["loss"]), r"'loss'.*train/loss"),
        (lambda _: charts({"a": {f"m{n}": {0: 1.0} for n in range(MAX_CHARTS + 1)}}, ["m*"]), f"{MAX_CHARTS + 1}"),
        (lambda folder: save([CHART], folder / "x.bmp"), r"\.svg, \.png, \.pdf"),
        (lambda folder: save([CHART], folder / "x"), r"\.svg, \.png, \.pdf"),
        (lambda folder: save([CHART], folder / "missing" / "x.png"), r"missing/x\.png"),
        (lambda folder: main([str(folder)]), r"metrics\.jsonl"),
        (lambda folder: main([str(run(folder / "a", [{"step": 0, "train/loss": 1.0}]))]), "--metric"),
    ],
    ids=["no such metric", "too many", "suffix", "no suffix", "no folder", "no run", "no reward"],
)
def test_what_cannot_be_plotted_is_refused(tmp_path: Path, refused: Callable[[Path], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        refused(tmp_path)
    assert not list(tmp_path.glob("**/x*"))


def test_text_has_the_metric_the_runs_and_lines_within_the_width() -> None:
    sums = Chart("eval/sums", {"first": [(0, 0.0), (4, 1.0)], "second": [(0, 1.0)]})
    text = as_text([sums, Chart("constant", {"first": [(0, 0.5), (1, 0.5)]})], width=60, colour=False)
    assert all(part in text for part in ("eval/sums", "constant", "first", "second"))
    assert max(map(len, text.splitlines())) <= 60
    assert "\x1b" not in text


def test_the_height_of_a_point_is_its_value() -> None:
    def highest_column(points: list[tuple[int, float]]) -> int:
        lines = as_text([Chart("m", {"a": points})], width=60, colour=False).splitlines()
        plotted = (line.partition("┤")[2] or line.partition("│")[2] for line in lines)
        return next(len(line) - len(line.lstrip()) for line in plotted if line.strip(" │"))

    assert highest_column([(0, 0.0), (1, 1.0)]) > 40
    assert highest_column([(0, 1.0), (1, 0.0)]) == 0


def test_the_picture_is_the_same_each_time_and_has_every_title(tmp_path: Path) -> None:
    figures = charts({"a": read(run(tmp_path / "a"))})
    for name in ("one.svg", "two.svg"):
        save(figures, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert "eval/sums" in (tmp_path / "one.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "one.svg", "two.svg"]


def test_the_command_prints_charts_and_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same_name = [str(run(tmp_path / parent / "run")) for parent in "ab"]
    assert main([*same_name, "--metric", "train/loss", "--out", str(tmp_path / "x.png")]) == 0
    assert "train/loss" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("rows", "has_charts"), [(ROWS, True), ([], False)])
def test_a_run_that_ends_has_its_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Mapping[str, float]], has_charts: bool
) -> None:
    folder = run(tmp_path / "a", rows)
    tracker = Plots()
    tracker.start(RunView(folder=folder))
    tracker.log(2, {"eval/sums": 0.9})
    tracker.close(None)
    assert ("eval/sums" in capsys.readouterr().out) is has_charts
    assert (folder / "curves.svg").exists() is has_charts
