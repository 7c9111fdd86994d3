"""Spans of a process: what is written, what is counted, and that a run never needs them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slime_core.track.record import Timeline


def spans(run: Path, process: str = "driver") -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "timeline" / f"{process}.jsonl").read_text().splitlines()]


def test_a_span_says_what_when_and_how_long(tmp_path: Path) -> None:
    before = time.time()
    timeline = Timeline(tmp_path, "sampler")
    with timeline.span("generate", 3):
        time.sleep(0.01)
    (span,) = spans(tmp_path, "sampler")
    assert (span["name"], span["step"]) == ("generate", 3)
    assert before - 0.001 <= span["start"] <= time.time()
    assert 0.01 <= span["seconds"] <= time.time() - before


def test_spans_of_another_start_of_the_run_follow(tmp_path: Path) -> None:
    Timeline(tmp_path, "driver").ended("train", 0, 1.0)
    Timeline(tmp_path, "driver").ended("train", 1, 2.0)
    assert [span["step"] for span in spans(tmp_path)] == [0, 1]


def test_seconds_add_up_by_name_until_they_are_taken(tmp_path: Path) -> None:
    timeline = Timeline(None, "learner-0")
    for seconds in (1.0, 2.0):
        timeline.ended("log_probs", 0, seconds)
    timeline.ended("actor_train", 0, 4.0)
    assert timeline.take_seconds() == {"log_probs": 3.0, "actor_train": 4.0}
    assert timeline.take_seconds() == {}
    assert not any(tmp_path.iterdir())


def test_what_fails_is_no_span(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), Timeline(tmp_path, "driver").span("train", 0):
        raise ValueError("no")
    assert not (tmp_path / "timeline").exists()


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("in the way")
    Timeline(tmp_path, "driver").ended("train", 0, 1.0)
