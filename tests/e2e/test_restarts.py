"""Engines and the router of a run die or stop, are started again, and the run goes on."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Running, require_ledger, running
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
def held(folder: Path, stage: str, *words: str) -> Iterator[tuple[Running, Path]]:
    """A run that waits before ``stage``, and the file that holds it."""
    (folder / "pause.py").write_text(PAUSE)
    hold, reached = folder / f"hold-{stage}", folder / f"at-{stage}"
    hold.touch()
    with running(folder / "run", "--plugin", folder / "pause.py", "--num-rollout", str(STEPS), *words) as run:
        run.wait_until(reached.exists)
        yield run, hold


def wait_for(pattern: str, run: Running) -> None:
    run.wait_until(lambda: re.search(pattern, run.output))


def schedulers(run: Running) -> dict[str, psutil.Process]:
    """Port of an engine -> the process of it that computes."""
    by_port = {}
    for server in run.family():
        port = next((word.partition("=")[2] for word in words(server) if word.startswith("--port=")), "")
        for process in children("sglang::scheduler", of=server.children()) if port else []:
            by_port[port] = process
    return by_port


def require_complete(run: Running, *restarted: str) -> None:
    """The run ends well and leaves nothing; every step was trained once, by samples of the weights before it;
    ``restarted`` were restarted once each."""
    started = run.family()
    assert run.end() == 0, run.output
    assert left_of(*started) == []
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(STEPS))
    assert {row["rollout/failed_ratio"] for row in rows if "train/loss" in row} == {0.0}
    restarts = {key: value for row in rows for key, value in row.items() if key.startswith("rollout/restarts/")}
    assert restarts == {f"rollout/restarts/{name}": 1.0 for name in restarted}
    for step in range(STEPS):
        samples = (run.folder / "samples" / f"train-{step:06}.jsonl").read_text().splitlines()
        assert {tuple(json.loads(line)["weight_versions"]) for line in samples} == {(str(step),)}
    require_ledger(run.folder)


@pytest.mark.parametrize("stage", ["generating", pytest.param("publishing", marks=pytest.mark.long)])
def test_an_engine_that_dies_is_started_again_and_no_sample_is_lost(tmp_path: Path, stage: str) -> None:
    words = ("--rollout-num-gpus", "2", "--sglang-log-requests", "--sglang-log-requests-format", "json")
    with held(tmp_path, stage, *words) as (run, hold):
        engines = schedulers(run)
        assert len(engines) == 2
        port = min(engines)
        (log,) = (file for file in run.folder.glob("logs/engine-*.log") if f"'port': {port}," in file.read_text())
        received = log.read_text().count("request.received")
        engines[port].suspend()
        hold.unlink()
        if stage == "generating":
            run.wait_until(lambda: log.read_text().count("request.received") > received)
        with suppress(psutil.NoSuchProcess):  # a busy machine may let the run notice first that the engine hangs
            engines[port].kill()
        wait_for("engine . gets requests again", run)
        assert schedulers(run).keys() == engines.keys(), "the engine came back at another address"
        (name,) = re.findall(r"(engine .) gets requests again", run.output)
        require_complete(run, name.replace(" ", "_"))


@pytest.mark.long
def test_a_run_waits_for_its_only_engine_and_its_router(tmp_path: Path) -> None:
    with held(tmp_path, "generating", "--use-fault-tolerance") as (run, hold):
        (victim,) = schedulers(run).values()
        victim.send_signal(signal.SIGSTOP)
        hold.unlink()
        wait_for("engine 0 is started again .*was stopped by a signal", run)
        (router,) = children("sglang::router", of=run.family())
        router.kill()
        wait_for("router gets requests again", run)
        wait_for("engine 0 gets requests again", run)
        require_complete(run, "engine_0", "router")
