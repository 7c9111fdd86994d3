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
from tests.processes import children, left_of, runs, words

STEPS = 6
ORPHAN_LIMIT_S = 10.0
"""Seconds within which every process of a killed driver has ended."""


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run whose output goes to ``folder``.txt; killed with all it started if the test fails."""
    started = ("run", "--plugin", "grpo", "--output-dir", str(folder), "--progress", "lines", "--seed", "3")
    with folder.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(
            command(*started, *BRIEF, "--num-rollout", "10000", "--save-interval", "3"),
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
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


def killed(victim: str, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Kills the one process of the run of that name; returns all that ran before, the driver not among them."""
    before = family(process)
    (one,) = children(victim, of=before)
    one.kill()
    return before


def test_a_run_survives_the_death_of_a_rank_of_ray_and_of_its_driver(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder) as process:
        for number, (victim, steps) in enumerate([("ray::LearnerActor", 1), ("raylet/raylet", 3)], start=1):
            wait_until(lambda at=steps: len(rows(folder)) >= at, process, folder)
            before = killed(victim, process)
            wait_until(lambda n=number: said(folder).count("slime: restart ") == n, process, folder)
            assert left_of(*before) == []
        wait_until(lambda: len(rows(folder)) >= 4, process, folder)
        started = family(process)
        names = " ".join(" ".join(words(one)) for one in started)
        assert "ray::DashboardAgent" in names
        assert "ray::RuntimeEnvAgent" in names
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=ORPHAN_LIMIT_S)
        assert [" ".join(words(one)) for one in alive if runs(one)] == []
    assert re.findall(r"slime: restart (\d) of 3 in 1 s: the run (.*?)\. ", said(folder)) == [
        ("1", "starts from its beginning, as it has no checkpoint"),
        ("1", "continues from step-000003"),
    ]
    assert re.search("learner rank 0: .* died", said(folder))
    assert "Ray died: its process raylet" in said(folder)
    more = slime(folder, "run", "--load", folder, "--num-rollout", "6", "--progress", "lines")
    assert more.code == 0, more.errors
    assert rows(folder) == list(range(STEPS))
    ledger = slime(folder, "ledger", folder)
    assert ledger.code == 0, ledger.output + ledger.errors
