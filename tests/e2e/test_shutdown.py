"""Runs that are interrupted or fail: their exit codes and messages, and that they leave no process or file."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Running, require_ledger, running
from tests.processes import children, left_of, words

ENDLESS = ("--num-rollout", "100000")


def has_trained(run: Running) -> bool:
    metrics = run.folder / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def test_sigterm_saves_what_was_trained_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, *ENDLESS) as run:
        run.wait_until(lambda: has_trained(run))
        started = run.family()
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 130
    assert run.errors.splitlines()[-1] == "slime: interrupted"
    assert "Traceback" not in run.errors
    assert len(started) > 5
    assert left_of(*started) == []
    trained = len((folder / "metrics.jsonl").read_text().splitlines())
    assert re.search(rf"SIGTERM: .*step {trained}\b", run.output)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{trained:06d}"]
    require_ledger(folder)


GATE = """
import os, time
from pathlib import Path
from slime_core import hookimpl

def stop(phase):
    folder = Path(os.environ["GATE"])
    if (folder / phase).exists():  # the phase in which the test wants to interrupt the run
        (folder / "reached").write_text(phase)
        time.sleep(3600)

@hookimpl
def slime_sampler_start(sampler):
    stop("build")

@hookimpl
async def slime_after_generate(sample, context):
    stop("rollout")
    return sample

@hookimpl
def slime_before_train_step(step):
    stop("training")

@hookimpl
def slime_checkpoint_state(place):
    if place == "driver":  # the sampler is asked before each rollout, too
        stop("save")
    return {}

@hookimpl
def slime_checkpoint_restore(state):
    pass

@hookimpl
def slime_after_weight_sync(version):
    stop("publish")
"""


@pytest.mark.long
@pytest.mark.parametrize("phase", ["build", "rollout", "training", "save", "publish"])
def test_ctrl_c_in_the_middle_of_a_phase_ends_the_run_with_the_next_step(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / phase).touch()
    monkeypatch.setenv("GATE", str(tmp_path))
    with running(tmp_path / "run", *ENDLESS, "--plugin", tmp_path / "gate.py", "--save-interval", "1") as run:
        run.wait_until((tmp_path / "reached").exists)
        started = run.family()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.errors
    assert "Traceback" not in run.errors
    saved, last = run.errors.splitlines()[-2:]
    assert str(tmp_path / "run") in saved
    assert last == "slime: interrupted"
    assert left_of(*started) == []


def scheduler_of(run: Running) -> psutil.Process | None:
    found = children("sglang::scheduler", of=run.family())
    return next((process for process in found if not "".join(words(process)).startswith("ray::")), None)


def test_a_server_that_dies_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, "--max-restarts", "0") as run:
        run.wait_until(lambda: has_trained(run))
        server, started = run.wait_until(lambda: scheduler_of(run)), run.family()
        server.kill()
        assert run.end() == 1
    assert "engine 0 ended" in run.errors
    assert "logs/engine-0.log" in run.errors
    assert "Traceback" not in run.errors.split("The last lines of")[0]
    assert left_of(*started) == []
