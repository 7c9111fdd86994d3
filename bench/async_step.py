"""Compares an asynchronous step with the longer of its two parts: rollout, or training with the weight update.

    python -m bench.async_step outputs/async [CASE ...] [--steps 10] [--rounds 2]     about seven minutes

Runs of the built-in demo with all their processes. The halves are those of a synchronous run, where each has the cores
to itself. An asynchronous run generates one rollout ahead (``--async-buffer-size 1``). Runs alternate; the first steps
of each are left out. 1.0 is perfect overlap; the sum of both halves is none.

    waiting   rewards wait two seconds, as for a tool or a judge on another machine, and so does every optimizer step,
              as for devices that compute (``bench/waits.py``): the halves hardly compete for cores
    reward    only rewards wait; training computes on the cores meanwhile
    plain     nothing waits: both halves compute, on the same cores

``bench.overlap_simulation`` measures the scheduler alone, with an engine and a learner that only sleep.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.step import LEFT_OUT
from bench.step import steps as rows_of

WAIT = ("--plugin", "bench/waits.py", "--rm-type", "late", "--waits.reward-s", "2")
CASES: Mapping[str, Sequence[str]] = {"waiting": (*WAIT, "--waits.train-s", "2"), "reward": WAIT, "plain": ()}
"""Name of a case -> its flags."""

AHEAD = ("--async-buffer-size", "1", "--max-staleness", "2")
FIXED = ("--plugin", "grpo", "--device", "cpu", "--eval-prompt-data", "none", "--eval-interval", "none")
HEAD = """
| case | rollout, s | training and update, s | synchronous step, s | asynchronous step, s (least to most) \
| of the larger half |
|---|---|---|---|---|---|"""

Rows = list[dict[str, float]]


def main() -> None:
    """Run every case, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    print(HEAD, flush=True)
    for name in given.cases:
        alone: Rows = []
        ahead: Rows = []
        for _ in range(given.rounds):
            alone += measured(given.folder / f"{name}-sync", CASES[name], steps=given.steps)
            ahead += measured(given.folder / f"{name}-async", [*CASES[name], *AHEAD], steps=given.steps)
        print_row(name, alone, ahead)
    print(f"\n{given.rounds} x {given.steps} steps; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")


def measured(folder: Path, flags: Sequence[str], *, steps: int) -> Rows:
    """Return the metrics of a run's middle steps; the last step has no rollout at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
    number = ("--num-rollout", str(LEFT_OUT + steps + 1), "--output-dir", str(folder), "--progress", "none")
    words = [sys.executable, "-m", "slime_core", "run", *FIXED, *flags, *number]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return rows_of(folder)[LEFT_OUT:-1]


def print_row(name: str, alone: Rows, ahead: Rows) -> None:
    """Print medians, and the range of the asynchronous steps."""
    rollout = statistics.median(row["perf/rollout_time"] for row in alone)
    training = statistics.median(row["perf/step_time"] - row["perf/rollout_time"] for row in alone)
    whole = statistics.median(row["perf/step_time"] for row in alone)
    found = [row["perf/step_time"] for row in ahead]
    step = statistics.median(found)
    cells = [name, *(f"{one:.2f}" for one in (rollout, training, whole))]
    cells += [f"{step:.2f} ({min(found):.2f} to {max(found):.2f})", f"{step / max(rollout, training):.3f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
