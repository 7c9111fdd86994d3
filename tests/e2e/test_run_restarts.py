"""A run whose learner, sampler or Ray dies restarts itself, and accounts for every prompt group."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.conftest import BRIEF, LIMIT_S, command, slime
from tests.processes import children, left_of, words

STEPS = 2

GATE = """
import os, time
from pathlib import Path
from slime_core import hookimpl

def hold(stage):
    folder = Path(__file__).parent
    (folder / f"at-{stage}").write_text(str(os.getpid()))
    while (folder / f"hold-{stage}").exists():
        time.sleep(0.02)

@hookimpl
def slime_sampler_start(sampler):
    hold("start")

@hookimpl
def slime_before_train_step(step):
    if step.rollout == 1:
        hold("training")
"""
"""A plugin that waits at the start, and before the second step, while the file ``hold-STAGE`` is next to it."""


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose output goes to ``folder``.txt; killed with all it started if the test fails."""
    (folder.parent / "gate.py").write_text(GATE)
    started = ("run", "--plugin", "grpo", "--plugin", str(folder.parent / "gate.py"), "--output-dir", str(folder))
    more = ("--progress", "lines", "--seed", "3", "--num-rollout", str(STEPS), "--save-interval", "1", *BRIEF)
    with folder.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(
            command(*started, *more), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
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


def said(folder: Path) -> str:
    return folder.with_suffix(".txt").read_text()


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str], folder: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline_s, said(folder)
        time.sleep(0.05)


def rows(folder: Path) -> list[int]:
    """The steps that ``metrics.jsonl`` holds."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def test_a_run_survives_the_death_of_a_rank_of_ray_and_of_its_driver(tmp_path: Path) -> None:
    folder, gates = tmp_path / "run", {stage: tmp_path / f"hold-{stage}" for stage in ("start", "training")}
    seen: dict[str, str] = {}

    def reached() -> dict[str, str]:
        """Stage -> the process that came to it last."""
        places = {stage: tmp_path / f"at-{stage}" for stage in gates}
        return {stage: place.read_text() for stage, place in places.items() if place.exists()}

    with running(folder) as process:

        def wait_at(stage: str) -> None:
            """Returns when the run waits at ``stage``, after an earlier start of it did."""
            wait_until(lambda: reached().get(stage, "") not in ("", seen.get(stage)), process, folder)
            seen.update(reached())

        gates["training"].touch()
        # A rank dies before it trains the second step, Ray as soon as the run has started again.
        for number, (stage, victim) in enumerate([("training", "ray::LearnerActor"), ("start", "raylet/raylet")], 1):
            wait_at(stage)
            before = family(process)
            gates["start"].touch()
            (one,) = children(victim, of=before)
            one.kill()
            wait_until(lambda n=number: said(folder).count("slime: restart ") == n, process, folder)
            assert left_of(*before) == []
            gates["training"].unlink(missing_ok=True)
        wait_at("start")
        wait_until(lambda: children("sglang::scheduler", of=family(process)), process, folder)
        started = family(process)
        names = " ".join(" ".join(words(one)) for one in started)
        assert "ray::DashboardAgent" in names
        assert "ray::RuntimeEnvAgent" in names
        process.kill()
        assert left_of(*started) == []
    assert re.findall(r"slime: restart (\d) of 3 .* (step-\d+)\. ", said(folder)) == [
        ("1", "step-000001"),
        ("2", "step-000001"),
    ]
    assert re.search("learner rank 0: .* died", said(folder))
    assert re.search("Ray died: .*raylet", said(folder))
    gates["start"].unlink()
    more = slime(folder, "run", "--load", folder, "--progress", "lines")
    assert more.code == 0, more.errors
    assert rows(folder) == list(range(STEPS))
    ledger = slime(folder, "ledger", folder)
    assert ledger.code == 0, ledger.output + ledger.errors
