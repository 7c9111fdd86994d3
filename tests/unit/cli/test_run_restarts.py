"""When a run restarts after a death, from where, and when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.run import RunRestarts, open_record
from slime_core.config.load import Resolved
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import JobConfig, ModelConfig, RunConfig
from slime_core.errors import EngineSilent, NodeDied, ProcessDied, RunError, ServerDied
from slime_core.track.record import RunRecord

DEATH = ProcessDied("learner rank 1: train() died.\n    pid: 7")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return RunRecord(tmp_path / "run").directory


def saved(folder: Path, step: int) -> None:
    with drafted(folder / "checkpoints", step) as draft:
        write_state(draft, RunState(step))


def resolved(load: Path | None = None, total: int = 10) -> Resolved:
    config = RunConfig(model=ModelConfig(load=load), rollout=RolloutConfig(num_rollout=total), run=JobConfig())
    return Resolved(config=config, provenance={}, plugin_options={})


def test_a_run_restarts_from_its_newest_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder, 2)
    saved(folder, 4)
    settings = RunRestarts(3, total=10, sleep=lambda _: None).after(DEATH, resolved(), folder)
    assert (settings.config.model.load, settings.config.run.output_dir) == (folder, folder)
    printed = capsys.readouterr().err
    assert str(DEATH) in printed
    assert "restart 1 of 3" in printed
    assert "step-000004" in printed
    assert "--max-restarts" in printed


def test_a_death_of_one_line_and_what_follows_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    death = ProcessDied("learner rank 1: train() died. Its process 7 was killed by SIGKILL.")
    RunRestarts(3, total=10, sleep=lambda _: None).after(death, resolved(), folder)
    (line,) = capsys.readouterr().err.splitlines()
    assert "restart 1 of 3" in line
    assert str(death) in line


def test_without_a_checkpoint_a_run_starts_from_where_it_started(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "checkpoints" / "step-000007"
    settings = RunRestarts(3, total=10, sleep=lambda _: None).after(DEATH, resolved(load=other), folder)
    assert (settings.config.model.load, settings.config.run.output_dir) == (other, folder)


def test_restarts_are_limited_until_the_next_checkpoint_and_each_waits_longer(folder: Path) -> None:
    pauses_s: list[float] = []
    restarts = RunRestarts(3, total=10, sleep=pauses_s.append)
    for _ in range(3):
        restarts.after(DEATH, resolved(), folder)
    saved(folder, 2)
    for _ in range(3):
        restarts.after(DEATH, resolved(), folder)
    with pytest.raises(ProcessDied) as caught:
        restarts.after(DEATH, resolved(), folder)
    assert pauses_s == [1, 2, 4, 1, 2, 4]
    assert f"step 2 with --load {folder}" in str(caught.value)


def test_pauses_do_not_exceed_a_minute(folder: Path) -> None:
    pauses_s: list[float] = []
    restarts = RunRestarts(20, total=10, sleep=pauses_s.append)
    for _ in range(9):
        restarts.after(DEATH, resolved(), folder)
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("death", [ServerDied("engine 0 died"), NodeDied("Ray died"), EngineSilent("no answer")])
def test_without_restarts_a_death_ends_the_run_as_itself(folder: Path, death: RunError) -> None:
    with pytest.raises(type(death), match=str(death)) as caught:
        RunRestarts(0, total=10).after(death, resolved(), folder)
    assert type(caught.value) is type(death)


def test_a_death_after_the_last_checkpoint_ends_the_run(folder: Path) -> None:
    saved(folder, 10)
    with pytest.raises(ProcessDied, match="step-000010"):
        RunRestarts(3, total=10).after(DEATH, resolved(), folder)


def test_a_start_in_the_folder_of_an_earlier_one_without_a_checkpoint_drops_its_rows(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/a": 1.0}\n{"step": 1}\n')
    record = open_record(RunConfig(run=JobConfig(output_dir=folder)), None, restarts=True)
    record.begin()
    assert (record.directory, record.resumed_step) == (folder, 0)
    assert (folder / "metrics.jsonl").read_text() == ""


def test_a_released_folder_stays_locked_by_its_next_owner(folder: Path) -> None:
    first = RunRecord(folder)
    first.release()
    second = RunRecord(folder)
    del first
    assert second.lock_warning == ""
    assert _is_locked_for_others(folder)


def _is_locked_for_others(folder: Path) -> bool:
    code = f"import fcntl; fcntl.lockf(open({str(folder / 'run.lock')!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0
