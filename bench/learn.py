"""Runs the embedded task with three seeds and three controls, and prints the tables of ``docs/results.md``.

    python bench/learn.py FOLDER        about fifteen minutes on two cores; finished runs are only read

The controls take one thing away each: rewards that mean something, the learning rate, the weight updates. None may
learn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNS: dict[str, tuple[str, ...]] = {
    "seed-0": ("--seed", "0"),
    "seed-1": ("--seed", "1"),
    "seed-2": ("--seed", "2"),
    "random": ("--seed", "0", "--rm-type", "random"),
    "lr-0": ("--seed", "0", "--lr", "0"),
    "frozen": ("--seed", "0", "--update-weights-interval", "0"),
}
"""Name of a run's folder -> its flags beside ``slime run --plugin grpo``."""

SEEDS = ("seed-0", "seed-1", "seed-2")
CONTROLS = {"random": "random rewards", "lr-0": "learning rate 0", "frozen": "engines never updated"}
KINDS = ("", "/carries=0", "/carries=1", "/carries=2", "/digits=1+1", "/digits=1+2", "/digits=2+1", "/digits=2+2")
LAST = "step-000080"
"""The checkpoint that a finished run has."""

EDGE = 5
"""Rows at the start and at the end of a run that are averaged."""


def main(folder: Path) -> None:
    """Run what is missing, then print everything."""
    for name, flags in RUNS.items():
        if not (folder / name / "checkpoints" / LAST).exists():
            slime("run", "--plugin", "grpo", "--progress", "none", "--output-dir", str(folder / name), *flags)
    runs = {name: read(folder / name) for name in RUNS}
    print_accuracies([runs[name] for name in SEEDS])
    print_controls(folder, runs)
    print_parity(runs)
    print_times(runs["seed-0"])
    sys.exit("\n".join(missed(folder, runs)) or 0)


def missed(folder: Path, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What does not hold of what the documentation says."""
    start = runs["seed-0"][0]["eval/arithmetic"]
    ends = {name: rows[-1]["eval/arithmetic"] for name, rows in runs.items()}
    chance = accuracy(slime("eval", str(folder / "random"), "--rm-type", "exact_match"))
    found = [f"{name} ends at {ends[name]}, below 0.90" for name in SEEDS if ends[name] < 0.90]
    found += [f"the start is {start}, above 0.45"] if start > 0.45 else []
    found += [f"random rewards end at {chance}, over the start by more than 0.10"] if chance > start + 0.10 else []
    return found + [f"{name} moved from {start} to {ends[name]}" for name in ("lr-0", "frozen") if ends[name] != start]


def slime(*words: str) -> str:
    """The output of one command, which has to succeed."""
    return subprocess.run(
        [sys.executable, "-m", "slime_core", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that trained."""
    return [row for row in rows if "train/loss" in row]


def print_accuracies(seeds: Sequence[list[dict[str, Any]]]) -> None:
    """Start and end by difficulty."""
    print("\n| | start | " + " | ".join(SEEDS) + " |\n|---|---|---|---|---|")
    for kind in KINDS:
        name = f"eval/arithmetic{kind}"
        ends = " | ".join(f"{rows[-1][name]:.3f}" for rows in seeds)
        print(f"| {kind.removeprefix('/') or 'all'} | {seeds[0][0][name]:.3f} | {ends} |")


def print_controls(folder: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Accuracy and reward of the runs that must not learn."""
    print("\n| control | accuracy at the end | of the checkpoint | reward, first rows | reward, last rows |")
    print("|---|---|---|---|---|")
    for name, label in CONTROLS.items():
        checkpoint = accuracy(slime("eval", str(folder / name), "--rm-type", "exact_match"))
        # The random run scores its evaluations with coins too: only the checkpoint says what it can do.
        served = checkpoint if name == "random" else runs[name][-1]["eval/arithmetic"]
        first, last = (mean_reward(part) for part in (steps(runs[name])[:EDGE], steps(runs[name])[-EDGE:]))
        print(f"| {label} | {served:.3f} | {checkpoint:.3f} | {first:.3f} | {last:.3f} |")


def accuracy(output: str) -> float:
    """What ``slime eval`` printed."""
    return float(next(line.split()[1] for line in output.splitlines() if line.startswith("eval/arithmetic:")))


def mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Mean reward over these rows."""
    return statistics.fmean(row["rollout/raw_reward"] for row in rows)


def print_parity(runs: dict[str, list[dict[str, Any]]]) -> None:
    """How far apart trainer and engine are."""
    print("\n| | mean over the rows | largest single token |\n|---|---|---|")
    for name in SEEDS:
        mean = statistics.fmean(row["train/train_rollout_logprob_abs_diff"] for row in steps(runs[name]))
        largest = max(row["train/train_rollout_logprob_max_diff"] for row in steps(runs[name]))
        print(f"| {name} | {mean:.1e} | {largest:.1e} |")
    last = steps(runs["frozen"])[-1]
    mean, largest = last["train/train_rollout_logprob_abs_diff"], last["train/train_rollout_logprob_max_diff"]
    print(f"| engines never updated, last row | {mean:.1e} | {largest:.1e} |")


def print_times(rows: list[dict[str, Any]]) -> None:
    """Shares of a step, medians without the first and the last row."""
    trained = steps(rows)
    print("\n| part of a step | share |\n|---|---|")
    for part in ("rollout", "train", "update_weights"):
        share = statistics.median(row[f"perf/{part}_time"] / row["perf/step_time"] for row in trained[1:-1])
        print(f"| {part} | {share:.2f} |")
    usual = statistics.median(row["perf/step_time"] for row in trained[1:-1])
    print(f"\nfirst step to the median step: {trained[0]['perf/step_time'] / usual:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
