"""Runs that are interrupted or fail: their exit codes and messages, and that they leave no process or file."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import BRIEF, LIMIT_S, command, slime
from tests.processes import children, left_of, words

END_LIMIT_S = 250
"""An idle machine needs less than ten seconds; a busy one takes longer, but not as long as what a run may wait for."""


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A long run of short steps in the background; killed with all it started if the test fails."""
    endless = (*BRIEF, "--num-rollout", "100000")
    words = ("run", "--plugin", "grpo", "--output-dir", str(folder), "--progress", "lines", *endless, *words)
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in [*family(process), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def wait_for(path: Path, process: subprocess.Popen[str], *, limit_s: float = LIMIT_S) -> None:
    """Returns when ``path`` exists and holds something."""
    deadline = time.monotonic() + limit_s
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear within {limit_s} s"
        time.sleep(0.1)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_sigterm_saves_what_was_trained_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as process:
        wait_for(folder / "metrics.jsonl", process)
        started = family(process)
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "slime: interrupted"
    assert "Traceback" not in errors
    assert len(started) > 5
    assert left_of(*started) == []
    trained = len((folder / "metrics.jsonl").read_text().splitlines())
    assert re.search(rf"SIGTERM: .*step {trained}\b", printed)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{trained:06d}"]
    ledger = slime(folder, "ledger", folder)
    assert ledger.code == 0, ledger.output + ledger.errors


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
):
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / phase).touch()
    monkeypatch.setenv("GATE", str(tmp_path))
    with running(tmp_path / "run", "--plugin", str(tmp_path / "gate.py"), "--save-interval", "1") as process:
        wait_for(tmp_path / "reached", process)
        started = family(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    saved, last = errors.splitlines()[-2:]
    assert str(tmp_path / "run") in saved
    assert last == "slime: interrupted"
    assert left_of(*started) == []


def server_of(process: subprocess.Popen[str], name: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """The server of a run that is called so, and all its processes."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        started = family(process)
        for one in children(name, of=started):
            if not "".join(words(one)).startswith("ray::"):
                return one, started
        time.sleep(0.1)
    found = "\n".join(f"{one}: {' '.join(words(one)).strip()}" for one in started)
    for one in [*started, process]:
        one.kill()
    pytest.fail(f"no process of the run is called {name}:\n{found}\n{process.communicate()}")


def test_a_server_that_dies_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    with running(tmp_path / "run", "--max-restarts", "0") as process:
        wait_for(tmp_path / "run" / "metrics.jsonl", process)
        server, started = server_of(process, "sglang::scheduler")
        server.kill()
        _, errors = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == 1
    assert "engine 0 ended" in errors
    assert "logs/engine-0.log" in errors
    assert "Traceback" not in errors.split("The last lines of")[0]
    assert left_of(*started) == []


def test_a_second_run_into_the_same_folder_is_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    run = slime(tmp_path, "run", "--plugin", "grpo", "--output-dir", tmp_path)
    assert (run.code, [path.name for path in tmp_path.iterdir()]) == (2, ["metrics.jsonl"])
    assert "holds another run's files" in run.errors
    assert "Traceback" not in run.errors
