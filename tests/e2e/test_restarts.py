"""Engines and the router of a run die or stop, are started again, and the run goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import BRIEF, LIMIT_S, command, slime
from tests.processes import children, left_of, words

STEPS = 4
PAUSE = """
import time
from pathlib import Path
from slime_core import hookimpl

def pause(stage):
    while Path(__file__).with_name(f"hold-{stage}").exists():
        Path(__file__).with_name(f"at-{stage}").touch()
        time.sleep(0.02)

@hookimpl
def slime_after_weight_sync(version):
    if version == 1:
        pause("generating")

@hookimpl
def slime_before_train_step():
    pause("publishing")
"""
"""A plugin that waits before the stage while the file ``hold-STAGE`` is next to it."""


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose output goes to ``folder``.txt; killed with all it started if the test fails."""
    (folder.parent / "pause.py").write_text(PAUSE)
    started = ("run", "--plugin", "grpo", "--plugin", str(folder.parent / "pause.py"), "--output-dir", str(folder))
    shown = ("--progress", "lines", *BRIEF, *words)
    with folder.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(
            command(*started, *shown), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in [*family(process), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_for(pattern: str, process: subprocess.Popen[str], folder: Path) -> None:
    """Returns when the run has printed what matches ``pattern``."""
    started_s = time.monotonic()
    while not re.search(pattern, said := folder.with_suffix(".txt").read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < started_s + LIMIT_S, f"{pattern!r} was not printed within {LIMIT_S} s:\n{said}"
        time.sleep(0.1)


def log_of(port: str, folder: Path) -> Path:
    """The log of the engine at ``port``."""
    (found,) = (one for one in folder.glob("logs/engine-*.log") if f"'port': {port}," in one.read_text())
    return found


def requests_in(log: Path) -> int:
    """Requests that an engine that logs them has received."""
    return log.read_text().count("request.received")


def wait_at(stage: str, process: subprocess.Popen[str], folder: Path) -> None:
    """Returns when the run waits before ``stage``."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (folder.parent / f"at-{stage}").exists():
        assert process.poll() is None, folder.with_suffix(".txt").read_text()
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def schedulers(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Port of an engine -> the process of it that computes."""
    found = {}
    for server in family(process):
        port = next((word.partition("=")[2] for word in words(server) if word.startswith("--port=")), "")
        for one in children("sglang::scheduler", of=server.children()) if port else []:
            found[port] = one
    return found


def require_whole(folder: Path, *restarted: str) -> None:
    """Every step was trained once, by samples of the weights before it; the ledger balances; ``restarted`` were
    restarted once each."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(STEPS))
    assert {row["rollout/failed_ratio"] for row in rows if "train/loss" in row} == {0.0}
    restarts = {key: value for row in rows for key, value in row.items() if key.startswith("rollout/restarts/")}
    assert restarts == {f"rollout/restarts/{name}": 1.0 for name in restarted}
    for step in range(STEPS):
        samples = (folder / "samples" / f"train-{step:06}.jsonl").read_text().splitlines()
        assert {tuple(json.loads(line)["weight_versions"]) for line in samples} == {(str(step),)}
    ledger = slime(folder, "ledger", folder)
    assert ledger.code == 0, ledger.output + ledger.errors


@pytest.mark.parametrize("stage", ["generating", pytest.param("publishing", marks=pytest.mark.long)])
def test_an_engine_that_dies_is_started_again_and_no_sample_is_lost(tmp_path: Path, stage: str) -> None:
    folder, hold = tmp_path / "run", tmp_path / f"hold-{stage}"
    hold.touch()
    logged = ("--sglang-log-requests", "--sglang-log-requests-format", "json")
    with running(folder, "--rollout-num-gpus", "2", "--num-rollout", str(STEPS), *logged) as process:
        wait_at(stage, process, folder)
        engines = schedulers(process)
        assert len(engines) == 2
        victim, log = engines[min(engines)], log_of(min(engines), folder)
        received = requests_in(log)
        victim.suspend()
        hold.unlink()
        while stage == "generating" and requests_in(log) == received:
            assert process.poll() is None, folder.with_suffix(".txt").read_text()
            time.sleep(0.1)
        victim.kill()
        wait_for("engine . gets requests again", process, folder)
        assert schedulers(process).keys() == engines.keys(), "the engine came back at another address"
        started = family(process)
        assert process.wait(LIMIT_S) == 0, folder.with_suffix(".txt").read_text()
    assert left_of(*started) == []
    (name,) = re.findall(r"(engine .) gets requests again", folder.with_suffix(".txt").read_text())
    require_whole(folder, name.replace(" ", "_"))


@pytest.mark.long
def test_a_run_waits_for_its_only_engine_and_its_router(tmp_path: Path) -> None:
    folder, hold = tmp_path / "run", tmp_path / "hold-generating"
    hold.touch()
    with running(folder, "--use-fault-tolerance", "--num-rollout", str(STEPS)) as process:
        wait_at("generating", process, folder)
        ((_, victim),) = schedulers(process).items()
        victim.send_signal(signal.SIGSTOP)
        hold.unlink()
        wait_for("engine 0 is started again .*was stopped by a signal", process, folder)
        (router,) = children("sglang::router", of=family(process))
        router.kill()
        wait_for("router gets requests again", process, folder)
        wait_for("engine 0 gets requests again", process, folder)
        started = family(process)
        assert process.wait(LIMIT_S) == 0, folder.with_suffix(".txt").read_text()
    assert left_of(*started) == []
    require_whole(folder, "engine_0", "router")
