"""Trains the built-in demo with synchronous and asynchronous rollouts: accuracy, staleness and step times.

    python -m bench.overlap FOLDER [NAME ...]     without names all runs; finished runs are only read

Generating and training share the cores here, so steps gain little; what the table shows is what training on samples
that are a rollout or more old costs in accuracy. `bench/overlap_simulation.py` measures what overlap gives where
nothing is shared.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

AHEAD = "--async-buffer-size 1 --max-staleness 2"
RUNS: Mapping[str, tuple[str, str]] = {
    "sync": ("synchronous", ""),
    "ahead-1": ("one ahead", AHEAD),
    "ahead-1-tis": ("one ahead, `tis`", f"{AHEAD} --corrections tis"),
    "ahead-3": ("three ahead", "--async-buffer-size 3 --max-staleness 4"),
}
"""Name of a run's folder -> its name in the table, and its flags."""

SCORE = "eval/arithmetic"
NUM_ROLLOUTS, SAMPLES = 80, 256
SHOWN = (0, 10, 20, 40, NUM_ROLLOUTS)


def main(folder: Path, names: Sequence[str]) -> None:
    """Run what is missing, and print the table."""
    for name in names:
        carry_out(folder / name, RUNS[name][1])
    print("| | " + " | ".join(f"after {step}" for step in SHOWN) + " | samples | staleness | s per step |")
    print("|" + "---|" * (len(SHOWN) + 4))
    for name in names:
        print_row(RUNS[name][0], read(folder / name))


def carry_out(folder: Path, flags: str) -> None:
    """Run the training, unless it is finished."""
    if not (folder / "checkpoints" / f"step-{NUM_ROLLOUTS:06d}").exists():
        print(f"{folder.name}: training", file=sys.stderr, flush=True)
        fixed = f"--plugin grpo --seed 0 --progress none --num-rollout {NUM_ROLLOUTS} --eval-interval 10"
        words = ("run", *fixed.split(), "--output-dir", str(folder), *flags.split())
        subprocess.run([sys.executable, "-m", "slime_core", *words], check=True)


def read(folder: Path) -> Rows:
    """Return the rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def print_row(label: str, rows: Rows) -> None:
    """Print accuracy after some rollouts, mean staleness of the trained samples, and the median step."""
    scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
    trained = [row for row in rows if "train/loss" in row]
    age = statistics.fmean(row.get("rollout/staleness/mean", 0.0) for row in trained)
    usual = statistics.median(row["perf/step_time"] for row in trained[1:-1])
    cells = [*(f"{scores[step]:.3f}" for step in SHOWN), f"{SAMPLES * len(trained)}", f"{age:.2f}", f"{usual:.2f}"]
    print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(RUNS))
