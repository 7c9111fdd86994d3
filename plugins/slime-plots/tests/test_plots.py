"""Charts of runs: which metrics are selected, how they are plotted, and the messages for those that cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


class TestTracker(TrackerSuite):
    component = "plots"


def run(folder: Path, rows: list[Mapping[str, float]] = ROWS) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_default_is_the_reward_and_one_score_for_each_evaluation_set(tmp_path: Path) -> None:
    assert charts({"a": read(run(tmp_path / "a"))}) == [
        Chart("rollout/raw_reward", {"a": [(0, 0.25), (1, 0.5)]}),
        Chart("eval/sums", {"a": [(0, 0.4), (2, 0.9)]}),
    ]


def test_runs_share_the_chart_of_a_metric_that_both_have(tmp_path: Path) -> None:
    runs = {"a": read(run(tmp_path / "a")), "b": read(run(tmp_path / "b", [{"step": 3, "train/loss": 2.0}]))}
    assert charts(runs, ["train/*"]) == [Chart("train/loss", {"a": [(0, 0.5), (1, 0.25)], "b": [(3, 2.0)]})]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    assert read(folder)["train/loss"] == {0: 0.5, 1: 0.25}


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": "x"}', '{"step": 1, "a": null}', "nonsense", "[" * 100_000])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    folder = run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:4"):
        read(folder)


def test_a_metric_that_no_run_has_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'loss'.*train/loss"):
        charts({"a": read(run(tmp_path / "a"))}, ["loss"])


def test_too_many_charts_are_refused() -> None:
    rows = {f"m{number}": {0: 1.0} for number in range(MAX_CHARTS + 1)}
    with pytest.raises(DataError, match=f"{MAX_CHARTS + 1} metrics are selected"):
        charts({"a": rows}, ["m*"])


def test_text_has_the_metric_the_runs_and_lines_within_the_width() -> None:
    lines = {"first": [(0, 0.0), (4, 1.0)], "second": [(0, 1.0)]}
    text = as_text(
        [Chart("eval/sums", lines), Chart("constant", {"first": [(0, 0.5), (1, 0.5)]})], width=60, colour=False
    )
    assert all(part in text for part in ("eval/sums", "constant", "first", "second", "rollouts trained"))
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
    found = charts({"a": read(run(tmp_path / "a"))})
    save(found, tmp_path / "one.svg")
    save(found, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert "eval/sums" in (tmp_path / "one.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "one.svg", "two.svg"]


@pytest.mark.parametrize("name", ["x.bmp", "x", "missing/x.png"])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"\.svg, \.png, \.pdf|cannot be written"):
        save([Chart("m", {"a": [(0, 1.0)]})], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_charts_and_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same_name = [str(run(tmp_path / parent / "run")) for parent in "ab"]
    assert main([*same_name, "--metric", "train/loss", "--out", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr().out
    assert "train/loss" in printed
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_where_a_run_should_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        main([str(tmp_path)])


def test_runs_without_a_reward_or_an_evaluation_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no reward"):
        main([str(run(tmp_path / "a", [{"step": 0, "train/loss": 1.0}]))])


def test_a_run_that_ends_has_its_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a")
    tracker = Plots(None, RunView(folder=folder))
    tracker.start(RunView(folder=folder))
    tracker.log(2, {"eval/sums": 0.9})
    tracker.close(None)
    assert "eval/sums" in capsys.readouterr().out
    assert (folder / "curves.svg").stat().st_size > 1000


def test_a_run_that_wrote_nothing_has_no_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a", [])
    tracker = Plots(None, RunView(folder=folder))
    tracker.start(RunView(folder=folder))
    tracker.close(RuntimeError("ended early"))
    assert not capsys.readouterr().out
    assert not (folder / "curves.svg").exists()
