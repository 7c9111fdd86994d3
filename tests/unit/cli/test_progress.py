"""The progress output and the summary of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slime_core.cli.progress import Progress, summary
from slime_core.track.track import EvalFinished, Event, PhaseStarted, StepFinished, Warned

METRICS = {
    "rollout/raw_reward": 0.25,
    "rollout/response_len/mean": 3.4,
    "train/loss": -0.01,
    "perf/step_time": 0.913,
    "perf/tokens_per_gpu_per_sec": 512.4,
}
EVENTS: list[Event] = [
    EvalFinished(0, {"eval/sums": 0.34, "eval/sums-truncated_ratio": 0.0, "eval/sums/hard": 0.01}),
    PhaseStarted("rollout", 0),
    StepFinished(0, METRICS),
    Warned("97% of the responses are truncated."),
    EvalFinished(1, {"eval/sums": 0.5}),
]


LINES = [
    "evaluation of weights 0: sums 0.340",
    "step 1/40: reward 0.250 · 3 tokens per response · loss -0.0100 · 512 tokens/s/device · 0.91 s",
    "warning: 97% of the responses are truncated.",
    "evaluation of weights 1: sums 0.500",
]


@pytest.mark.parametrize(("shown", "lines"), [("auto", LINES), ("lines", LINES), ("none", [])])
def test_progress_is_one_line_an_event(shown, lines, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(steps=40, shown=shown) as progress:
        for event in EVENTS:
            progress(event)
    assert capsys.readouterr().out.splitlines() == lines
    assert (progress.first["eval/sums"], progress.last["eval/sums"]) == (0.34, 0.5)


def test_live_progress_shows_a_bar_below_the_lines_in_each_start_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(steps=40, shown="live")
    for _ in range(2):
        with progress:
            for event in EVENTS:
                progress(event)
        *lines, bar = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert [line.split()[:2] for line in lines[-4:]] == [line.split()[:2] for line in LINES]
        assert bar.startswith("next step ")


def test_the_summary_compares_start_and_end_with_parts_below_their_whole() -> None:
    stream = io.StringIO()
    summary(
        start={"eval/sums": 0.34, "eval/sums/carry": 0.01, "eval/sums-truncated_ratio": 0.2},
        end={"eval/sums": 0.974, "eval/sums/carry": 0.95},
        seconds=3725,
        paths=[("metrics", Path("runs/7/metrics.jsonl"))],
        stream=stream,
    )
    lines = [line.strip() for line in stream.getvalue().splitlines() if line.strip()]
    assert [line.split() for line in lines[:3]] == [
        ["evaluation", "start", "end", "change"],
        ["sums", "0.340", "0.974", "+0.634"],
        ["carry", "0.010", "0.950", "+0.940"],
    ]
    assert lines[3:] == ["Took 1 h 02 min.", "metrics: runs/7/metrics.jsonl"]


def test_the_summary_says_of_failed_samples_that_they_failed_and_how_many() -> None:
    stream = io.StringIO()
    start = {"eval/a": 0.0, "eval/a-failed/timeout": 3.0, "eval/b-failed": 0.5, "eval/b-failed/carries=0": 1.0}
    summary(start=start, end={**start, "eval/a-failed/timeout": 1.0}, seconds=1, paths=[], stream=stream)
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "failed: timeout 3 1 -2" in lines
    assert "b-failed 0.500 0.500 +0.000" in lines
    assert "carries=0 1.000 1.000 +0.000" in lines
