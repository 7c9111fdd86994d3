"""Rows, timers, listeners and trackers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from slime_core.errors import NonFiniteError, ProcessDied
from slime_core.track.record import RunRecord
from slime_core.track.samples import SampleWriter, read_samples
from slime_core.track.tensorboard import TensorBoard
from slime_core.track.track import EvalFinished, Event, Metrics, PhaseStarted, StepFinished, Track, Warned
from slime_core.types import Sample, SampleRecord, Status


class Memory:
    """A tracker that records its calls, or fails in one of them as often as the test sets."""

    def __init__(self, fails_in: str = "", failures: int = 99) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.seen: list[tuple[str, int, list[tuple[str | None, object, object]]]] = []
        self.calls: list[str] = []
        self.fails_in, self.failures = fails_in, failures
        self.error: BaseException | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in and self.calls.count(name) <= self.failures:
            raise ConnectionError("no such host")

    def start(self, run: object) -> None:
        self._called("start")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._called("log")
        self.rows.append((step, metrics))

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterator[SampleRecord]) -> None:
        self._called("samples")
        self.seen.append((kind, step, [(row.eval_set, row.prompt, row.reward) for row in rows]))

    def close(self, error: BaseException | None) -> None:
        self._called("close")
        self.error = error


def rows(record: RunRecord) -> list[dict[str, float]]:
    found = [json.loads(line) for line in record.metrics.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in found]


def test_a_step_is_one_line_written_when_it_ends(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with Track(record) as track:
        with track.step(0) as metrics:
            metrics.update({"rollout/raw_reward": 0.25, "train/loss": -1})
            assert record.metrics.read_text() == ""
        (line,) = record.metrics.read_text().splitlines()
        assert list(json.loads(line)) == ["step", "rollout/raw_reward", "train/loss", "perf/step_time"]
        assert line.startswith('{"step": 0, "rollout/raw_reward": 0.25, "train/loss": -1.0, "perf/step_time": ')


def test_an_evaluation_that_ends_late_is_added_to_its_row_and_rows_continue(tmp_path: Path) -> None:
    heard: list[Event] = []
    record, memory = RunRecord(tmp_path), Memory()
    with Track(record, trackers={"memory": memory}, listeners=[heard.append]) as track:
        for step in range(3):
            with track.step(step) as metrics:
                metrics["train/loss"] = step
                if step == 2:
                    track.evaluation(1, {"eval/sums": 0.5, "eval/weight_version": 1.0})
    assert rows(record) == [
        {"step": 0, "train/loss": 0.0},
        {"step": 1, "train/loss": 1.0, "eval/sums": 0.5, "eval/weight_version": 1.0},
        {"step": 2, "train/loss": 2.0},
    ]
    assert [step for step, _ in memory.rows] == [0, 1, 1, 2]
    assert memory.rows[2] == (1, {"eval/sums": 0.5, "eval/weight_version": 1.0})
    assert EvalFinished(1, {"eval/sums": 0.5, "eval/weight_version": 1.0}) in heard
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["metrics.jsonl", "run.lock"]


def test_an_evaluation_that_is_not_finite_leaves_the_row_as_it_was(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with Track(record) as track:
        with track.step(0) as metrics:
            metrics["train/loss"] = 1
        with pytest.raises(NonFiniteError, match="eval/sums"):
            track.evaluation(0, {"eval/sums": float("nan")})
    assert rows(record) == [{"step": 0, "train/loss": 1.0}]


def test_a_step_that_fails_writes_no_row_but_keeps_the_evaluation(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with Track(record) as track:
        track.evaluation(0, {"eval/sums": 0.1})
        with pytest.raises(NonFiniteError, match="train/loss"), track.step(0) as metrics:
            metrics["train/loss"] = float("nan")
    assert rows(record) == [{"step": 0, "eval/sums": 0.1}]


def test_a_resumed_run_carries_the_last_evaluation_into_its_first_row(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with Track(record) as track:
        with track.step(0):
            pass
        track.evaluation(1, {"eval/sums": 0.5})
    resumed = RunRecord(tmp_path, resumed_step=1)
    with Track(resumed) as track, track.step(1) as metrics:
        metrics["train/loss"] = 1
    assert rows(resumed) == [{"step": 0}, {"step": 1, "train/loss": 1.0, "eval/sums": 0.5}]


def dies_after_its_checkpoint(record: RunRecord) -> None:
    with Track(record) as track, track.step(0) as metrics:
        metrics["train/loss"] = 0.5
        (record.checkpoints / "step-000001").mkdir()
        raise ProcessDied("a learner rank, while it published weights")


def test_a_step_that_fails_after_its_checkpoint_has_a_row(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    with pytest.raises(ProcessDied):
        dies_after_its_checkpoint(record)
    assert rows(record) == [{"step": 0, "train/loss": 0.5}]


def test_timers_of_a_step_add_up_and_fit_into_it(tmp_path: Path) -> None:
    memory = Memory()
    with Track(RunRecord(tmp_path), trackers={"memory": memory}) as track:
        with track.timer("start"):
            pass
        with track.step(0):
            for phase in ("rollout", "train", "rollout"):
                with track.timer(phase):
                    pass
    ((_, metrics),) = memory.rows
    assert list(metrics) == ["perf/rollout_time", "perf/train_time", "perf/step_time"]
    assert 0 < metrics["perf/rollout_time"] + metrics["perf/train_time"] <= metrics["perf/step_time"]


def test_listeners_hear_everything_in_order(tmp_path: Path) -> None:
    heard: list[Event] = []
    with Track(RunRecord(tmp_path), listeners=[heard.append]) as track:
        track.evaluation(0, {"eval/sums": 0.1})
        with track.step(0), track.timer("rollout"):
            track.warn("Equal rewards.")
    assert heard[:3] == [EvalFinished(0, {"eval/sums": 0.1}), PhaseStarted("rollout", 0), Warned("Equal rewards.")]
    assert [type(event) for event in heard[3:]] == [StepFinished]


@pytest.mark.parametrize(
    ("fails_in", "failures", "calls", "logged"),
    [
        ("start", 1, ["start"], []),
        ("log", 99, ["start", *["log", "samples"] * 2, "log"], []),
        ("samples", 99, ["start", *["log", "samples"] * 3], [0, 1, 2]),
        ("log", 2, ["start", *["log", "samples"] * 5], [2, 3, 4]),
    ],
)
def test_a_tracker_that_cannot_start_or_fails_three_times_is_off_and_reported_once(
    tmp_path: Path, fails_in: str, failures: int, calls: list[str], logged: list[int]
) -> None:
    heard: list[Event] = []
    broken, sound = Memory(fails_in, failures), Memory()
    trackers, record = {"broken": broken, "sound": sound}, RunRecord(tmp_path)
    with Track(record, trackers=trackers, listeners=[heard.append]) as track:
        for step in range(5):
            with track.step(step):
                pass
    assert [step for step, _ in sound.rows] == [row["step"] for row in rows(record)] == [0, 1, 2, 3, 4]
    assert ([call for call in broken.calls if call != "close"], [step for step, _ in broken.rows]) == (calls, logged)
    warnings = [event.message for event in heard if isinstance(event, Warned)]
    assert [re.search("'broken' .*ConnectionError: no such", text) is not None for text in warnings] == [True] * (
        failures != 2
    )


def test_a_tracker_is_started_before_it_logs_and_closed_with_what_ended_the_run(tmp_path: Path) -> None:
    watching, failure = Memory(), NonFiniteError("loss is NaN")
    track = Track(RunRecord(tmp_path), trackers={"watching": watching})

    def fail() -> None:
        with track, track.step(0):
            assert watching.calls == ["start"]
            raise failure

    with pytest.raises(NonFiniteError):
        fail()
    assert (watching.calls, watching.error) == (["start", "close"], failure)
    with Track(RunRecord(tmp_path / "other"), trackers={"watching": watching}):
        pass
    assert watching.error is None


def test_a_listener_that_fails_ends_no_run(tmp_path: Path) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no screen")

    record = RunRecord(tmp_path)
    with Track(record, listeners=[broken]) as track, track.step(0):
        pass
    assert rows(record) == [{"step": 0}]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    record = RunRecord(tmp_path)
    with Track(record, trackers={"tensorboard": TensorBoard(record.tensorboard)}) as track:
        for step in range(2):
            with track.step(step) as metrics:
                metrics["train/loss"] = 0.5 * step
    (file,) = record.tensorboard.iterdir()
    found = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "train/loss"
    ]
    assert found == [(0, "train/loss", 0.0), (1, "train/loss", 0.5)]


def test_a_tracker_that_sees_samples_gets_what_the_run_wrote(tmp_path: Path) -> None:
    record, reader = RunRecord(tmp_path), Memory()
    writer = SampleWriter(record.samples)
    left_out = Sample(prompt="3+3=", response="7", reward=0.0, status=Status.COMPLETED)
    with Track(record, trackers={"reader": reader}) as track:
        writer.write("eval-sums", 0, [Sample(prompt="1+1=", reward=1.0)])
        writer.write("eval-a-b", 0, [Sample(prompt="2+1=", reward={"score": 0.5})])
        track.evaluation(0, {"eval/sums": 1.0})
        with track.step(0) as metrics:
            metrics["train/loss"] = 3
            writer.write("train", 0, [Sample(prompt="2+2=", reward=0.5)], dropped=[("zero_std", left_out)])
        with track.step(1) as metrics:
            metrics["train/loss"] = 2
    assert reader.seen == [
        ("eval", 0, [("a-b", "2+1=", {"score": 0.5}), ("sums", "1+1=", 1.0)]),
        ("train", 0, [(None, "2+2=", 0.5), (None, "3+3=", 0.0)]),
        ("train", 1, []),
    ]
    assert [row.dropped for row in read_samples(record.samples, "train", 0)] == [None, "zero_std"]


# --- The numbers of a step --------------------------------------------------------------------------------------------


def test_a_name_given_twice_is_refused() -> None:
    metrics = Metrics({"train/loss": 0.5})
    with pytest.raises(ValueError, match=r"'train/loss' is already 0\.5"):
        metrics.update({"train/loss": 0.7})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"'train/grad_norm' is -?(nan|inf)"):
        Metrics({"train/grad_norm": value})


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="'train/loss' is a str"):
        Metrics({"train/loss": "0.5"})  # type: ignore[dict-item]
