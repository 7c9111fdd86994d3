"""The folder of a run."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_core.errors import CheckpointError, ConfigError, RunError
from slime_core.track.record import RunRecord, write_atomically
from slime_core.track.samples import SampleWriter
from slime_core.track.tensorboard import TensorBoard
from slime_core.track.timeline import Timeline
from slime_core.track.track import Track
from slime_core.types import Sample, Status


def test_a_run_folder_has_its_places(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run")
    record.write_text("config.toml", "seed = 1\n")
    assert record.config.read_text() == "seed = 1\n"
    assert sorted(path.name for path in record.directory.iterdir()) == [
        "checkpoints", "config.toml", "logs", "run.lock", "samples", "tensorboard", "timeline",
    ]  # fmt: skip


def test_a_new_run_folder_is_closed_to_others_and_one_that_was_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    modes = [RunRecord(tmp_path / name).directory.stat().st_mode & 0o777 for name in ("new/run", "shared")]
    assert modes == [0o700, 0o755]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step-000002", "notes.txt", "config-step-000002.toml"])
def test_a_folder_with_rows_checkpoints_or_other_files_is_refused(name: str, tmp_path: Path) -> None:
    RunRecord(tmp_path)
    (tmp_path / name).write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match=rf"{tmp_path} .*--load"):
        RunRecord(tmp_path)


def test_a_resumed_run_keeps_the_settings_so_far(tmp_path: Path) -> None:
    for settings in ("first", "second"):
        (tmp_path / "config.toml").write_text(settings)
        RunRecord(tmp_path, resumed_step=40).begin()
    assert (tmp_path / "config-step-000040.toml").read_text() == "first"
    assert (tmp_path / "config-step-000040-2.toml").read_text() == "second"


HOLDS = """
import sys
from slime_core.track.record import RunRecord
record = RunRecord(sys.argv[1])
print("held", flush=True)
input()
"""


def test_a_second_process_is_refused_and_learns_who_holds_the_folder_until_that_one_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for resumed_step in (None, 2):
            message = rf"{tmp_path} .*{other.pid} on .*, started 2.*\(kill {other.pid}\)"
            with pytest.raises(ConfigError, match=message):
                RunRecord(tmp_path, resumed_step=resumed_step)
        other.kill()
        other.wait()
        RunRecord(tmp_path, resumed_step=2)


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert "(No locks available)" in RunRecord(tmp_path).lock_warning


FULL = r" .*\(No space left on device\).*--load"


def test_a_full_disk_is_named_with_the_file_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(tmp_path)
    record.metrics.symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{record.metrics}{FULL}"):
        record.add_row(1, {"loss": 1.0})

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    path = tmp_path / "samples" / "train-000001.jsonl"
    with pytest.raises(RunError, match=f"{path}{FULL}"):
        write_atomically(path, "{}")
    assert list(path.parent.iterdir()) == []


def test_a_file_is_no_run_folder_and_a_run_may_resume_into_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/run "):
        RunRecord(tmp_path / "run")
    assert not RunRecord(tmp_path / "new", resumed_step=5).metrics.exists()


def test_a_resumed_run_drops_the_rows_it_will_do_again(tmp_path: Path) -> None:
    kept, again = (
        '{"step": 0, "a": 1.0}\n{"step": 1, "a": 2.0}\n',
        '{"step": 2, "a": 3.0, "eval/x": 0.5}\n{"step": 3}\n',
    )
    (tmp_path / "metrics.jsonl").write_text(kept + again + '{"st')
    record = RunRecord(tmp_path, resumed_step=2)
    assert record.metrics.read_text() == kept + again + '{"st'
    record.begin()
    assert record.metrics.read_text() == kept
    assert record.pending_evaluation == {"eval/x": 0.5}


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("", '{"step": 1, "a": 2.0}\n'),
        ('{"step": 1, "a": 2.0, "perf/step_time": 1.0}\n', '{"step": 1, "a": 2.0, "perf/step_time": 1.0}\n'),
        ('{"step": 1, "eval/x": 0.5}\n', '{"step": 1, "a": 2.0, "eval/x": 0.5}\n'),  # Ctrl-C while step 1 was saved
    ],
)
def test_a_row_that_was_not_written_is_that_of_the_checkpoint(tmp_path: Path, written: str, kept: str) -> None:
    first = '{"step": 0, "a": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(first + written)
    record = RunRecord(tmp_path, resumed_step=2, row={"a": 2.0})
    record.begin()
    assert record.metrics.read_text() == first + kept


def test_a_resume_that_never_begins_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    rows = '{"step": 0}\n{"step": 1, "eval/x": 0.5}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "config.toml").write_text("first")
    record = RunRecord(tmp_path, resumed_step=1)
    record.when_begun(lambda: record.write_text("config.toml", "second"))
    board = TensorBoard(record.tensorboard, resumed_step=1)
    with Track(record, trackers={"tensorboard": board}) as track:
        track.evaluation(1, {"eval/x": 0.75})
    assert record.metrics.read_text() == rows
    assert record.config.read_text() == "first"
    assert list(tmp_path.glob("config-step-*")) == []
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in record.tensorboard.iterdir() for event in EventFileLoader(str(path)).Load()]
    assert [event for event in events if event.HasField("session_log")] == []


def test_a_broken_row_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"loss": 1.0}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2 "):
        RunRecord(tmp_path, resumed_step=1)


# --- Samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "spans"), [(["3"], None), (["3", "4"], [["3", 0, 2], ["4", 2, 5]]), ([], None)], ids=str
)
def test_a_response_of_several_versions_records_which_tokens_are_whose(
    tmp_path: Path, versions: list[str], spans: list[list[object]] | None
) -> None:
    recorded = [("3", 0, 2), ("4", 2, 5)][: len(versions)]
    sample = Sample(group_index=0, index=1, weight_versions=versions, weight_spans=recorded, status=Status.COMPLETED)
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text())
    assert (row["weight_versions"], row.get("weight_spans")) == (versions, spans)


def test_the_first_rows_hold_tokens_masks_and_log_probs(tmp_path: Path) -> None:
    tokens = {"tokens": [7, 8, 9], "response_length": 2}
    samples = [
        Sample(index=0, **tokens, loss_mask=[1, 0], rollout_log_probs=[-0.5, 0.0]),
        Sample(index=1, **tokens),
        Sample(index=2, **tokens),
    ]
    path = SampleWriter(tmp_path, num_with_tokens=3).write("train", 3, samples[:1], dropped=[("zero_std", samples[1])])
    assert path is not None
    keys = ("tokens", "loss_mask", "rollout_log_probs")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[row[key] for key in keys] for row in rows] == [[[7, 8, 9], [1, 0], [-0.5, 0.0]], [[7, 8, 9], [1, 1], None]]
    path = SampleWriter(tmp_path, num_with_tokens=1).write("train", 4, samples)
    assert path is not None
    assert ["tokens" in json.loads(line) for line in path.read_text().splitlines()] == [True, False, False]


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    sample = Sample(prompt="\U0001f600 \ud83d", response="é", metadata={"source": "\udc00"}, error="\ud83d")
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["prompt"], row["response"], row["error"]) == ("\U0001f600 \ud83d", "é", "\ud83d")
    assert row["metadata"] == {"source": "\udc00"}


# --- Spans of a process -----------------------------------------------------------------------------------------------


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


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("in the way")
    Timeline(tmp_path, "driver").ended("train", 0, 1.0)
