"""Whole runs of the command, as a user starts them; the expensive ones once a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

from tests.external_engine import served

LIMIT_S = 900
"""Against hanging: a run of a few steps takes half a minute on two idle cores, and ten times that on a busy machine."""

ONE_ANSWER = 1.5 / 500
"""Tolerance between two measurements of one accuracy: where rounding decides between the two likeliest tokens, an
answer may depend on how prompts are batched. The built-in evaluation has 500 prompts."""

NO_EVAL = ("--eval-prompt-data", "none", "--eval-interval", "none")
BRIEF = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", *NO_EVAL)
"""For runs of which neither the size of a rollout nor an evaluation is tested."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended, and the run folder it was given."""

    code: int
    output: str
    errors: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def cursor(self, step: int) -> dict[str, Any]:
        """What the checkpoint of ``step`` holds of the data."""
        cursor: dict[str, Any] = json.loads((self.checkpoint(step) / "state.json").read_text())["cursor"]
        return cursor

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The rows of one file of samples."""
        return [json.loads(line) for line in (self.folder / "samples" / name).read_text().splitlines()]


def command(*words: str | Path) -> list[str]:
    """``slime`` of the environment that runs the tests."""
    return [sys.executable, "-m", "slime_core", *map(str, words)]


def slime(folder: Path, *words: str | Path, cwd: Path | None = None, **environment: str) -> Finished:
    """Run ``slime`` with ``words`` to its end."""
    env = {**os.environ, **environment}
    ended = subprocess.run(command(*words), cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    return Finished(ended.returncode, ended.stdout, ended.stderr, folder)


def weights(folder: Path) -> dict[str, bytes]:
    """Every weight of a Hugging Face folder, bit for bit."""
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


def train(folder: Path, *words: str | Path) -> Finished:
    """``slime run --plugin grpo`` into ``folder``, which has to succeed."""
    run = slime(folder, "run", "--plugin", "grpo", "--output-dir", folder, "--progress", "lines", *words)
    assert run.code == 0, run.errors + run.output
    return run


@dataclass(frozen=True, slots=True)
class Running:
    """A run in the background; what it says is in ``folder``.out and ``folder``.err."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def errors(self) -> str:
        return self.folder.with_suffix(".err").read_text()

    @property
    def output(self) -> str:
        return self.folder.with_suffix(".out").read_text() + self.errors

    def family(self) -> list[psutil.Process]:
        """All processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_until(self, holds: Callable[[], Any]) -> Any:
        """The first true value of ``holds``."""
        deadline_s = time.monotonic() + LIMIT_S
        while not (value := holds()):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.05)
        return value

    def end(self) -> int:
        """Its exit status."""
        return self.process.wait(LIMIT_S)


@contextmanager
def running(folder: Path, *words: str | Path) -> Iterator[Running]:
    """``slime run --plugin grpo`` into ``folder``; killed with all it started if the test fails."""
    words = ("run", "--plugin", "grpo", "--output-dir", folder, "--progress", "lines", *BRIEF, *words)
    with folder.with_suffix(".out").open("w") as output, folder.with_suffix(".err").open("w") as errors:
        process = subprocess.Popen(command(*words), stdout=output, stderr=errors, start_new_session=True)
    run = Running(process, folder)
    try:
        yield run
    finally:
        if process.poll() is None:
            for started in [*run.family(), psutil.Process(process.pid)]:
                with suppress(psutil.NoSuchProcess):
                    started.kill()
            process.wait()


def require_ledger(folder: Path) -> None:
    """Every prompt group of the run is accounted for."""
    ledger = slime(folder, "ledger", folder)
    assert ledger.code == 0, ledger.output + ledger.errors


@pytest.fixture(scope="session")
def external(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Popen, str]]:
    """A server and its URL; the runs of this process that test nothing of an engine's start share it, one after
    another."""
    with served(tmp_path_factory.mktemp("external") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def on_external(external: tuple[psutil.Popen, str]) -> tuple[str, str]:
    """The words by which a run takes the shared server instead of starting an engine."""
    return "--rollout-external-engine-addrs", external[1].removeprefix("http://")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four steps of the embedded run, with checkpoints after the second and the fourth; one run for all processes of
    the session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, stored = shared / "trained", shared / "trained.json"
    with FileLock(shared / "trained.lock"):
        if not stored.exists():
            words = ("--num-rollout", "4", "--save-interval", "2", "--eval-interval", "2", "--seed", "3")
            run = train(folder, *words)
            stored.write_text(json.dumps([run.code, run.output, run.errors]))
    return Finished(*json.loads(stored.read_text()), folder)
