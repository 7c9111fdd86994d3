"""Generating beside training against one after the other: step times and accuracy, the tables of docs/rollout.md.

    python bench/overlap.py FOLDER [NAME ...]     without names all runs; finished runs are only read

The `halves-` runs take their time by sleeping (`bench/slow.py`), so that two cores are enough to see what overlap
gives: a step may take at most 1.05 times the larger of its halves. The others are the embedded task as it is, on
whatever cores there are: what training on samples that are a rollout or two old costs in accuracy.
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

SLOW = Path(__file__).with_name("slow.py")
AHEAD = "--async-buffer-size 1 --max-staleness 2"
GROUPS, STEPS = 8, 12
SMALL = (
    f"--rollout-batch-size {GROUPS} --n-samples-per-prompt 4 --num-rollout {STEPS} --plugin {SLOW} "
    "--generate-function slow --eval-prompt-data none --eval-interval none"
)
HALVES = {"2-2": (2.0, 2.0), "2-1": (2.0, 1.0), "1-2": (1.0, 2.0)}
"""Name -> seconds that a rollout takes to generate, and to train."""

LIMIT = 1.05
"""Most that a step may take, in multiples of its larger half."""

EMBEDDED: Mapping[str, tuple[str, str]] = {
    "sync": ("synchronous", ""),
    "ahead-1": ("one ahead", AHEAD),
    "ahead-1-tis": ("one ahead, `tis`", f"{AHEAD} --corrections tis"),
    "ahead-3": ("three ahead", "--async-buffer-size 3 --max-staleness 4"),
}
"""Name -> how the table calls it, and its flags."""

SCORE = "eval/arithmetic"
NUM_ROLLOUTS = 80
SHOWN = (0, 10, 20, 40, NUM_ROLLOUTS)


def halves(name: str, mode: str) -> str:
    """The flags of one run whose halves take given times."""
    generating, training = HALVES[name]
    times = f"--slow.seconds-a-group {generating / GROUPS} --slow.seconds-a-step {training}"
    return f"{SMALL} {times} {AHEAD if mode == 'ahead' else ''}"


RUNS: Mapping[str, str] = {
    **{f"halves-{name}-{mode}": halves(name, mode) for name in HALVES for mode in ("sync", "ahead")},
    **{name: f"--num-rollout {NUM_ROLLOUTS} --eval-interval 10 {flags}" for name, (_, flags) in EMBEDDED.items()},
}
"""Name of a run's folder -> its flags."""


def main(folder: Path, names: Sequence[str]) -> None:
    """Run what is missing, print both tables, and fail where a step took too long."""
    for name in names:
        carry_out(folder / name, RUNS[name])
    measured = {pair: times(folder, pair) for pair in HALVES if (folder / f"halves-{pair}-ahead").exists()}
    print_halves(measured)
    print_embedded({name: read(folder / name) for name in EMBEDDED if (folder / name).exists()})
    slow = [pair for pair, found in measured.items() if found[3] > LIMIT * max(found[:2])]
    sys.exit(f"steps of {', '.join(slow)} take more than {LIMIT} times the larger half" if slow else 0)


def carry_out(folder: Path, flags: str) -> None:
    """Train, unless that was done."""
    if not (folder / "checkpoints").exists():
        print(f"{folder.name}: training", file=sys.stderr, flush=True)
        words = ("run", "--plugin", "grpo", "--seed", "0", "--progress", "none", "--output-dir", str(folder))
        subprocess.run([sys.executable, "-m", "slime_core", *words, *flags.split()], check=True)


def read(folder: Path) -> Rows:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def times(folder: Path, pair: str) -> tuple[float, float, float, float]:
    """Medians over the middle steps: generating, the rest and the step of the synchronous run, and the other's step."""
    alone, ahead = (read(folder / f"halves-{pair}-{mode}") for mode in ("sync", "ahead"))
    generating, step = median(alone, "rollout"), median(alone, "step")
    return generating, step - generating, step, median(ahead, "step")


def median(rows: Rows, part: str) -> float:
    """Of the steps between the second and the last but one, in seconds."""
    trained = [row for row in rows if "train/loss" in row][2:-1]
    return statistics.median(row[f"perf/{part}_time"] for row in trained)


def print_halves(measured: Mapping[str, tuple[float, float, float, float]]) -> None:
    """Seconds a step, one after the other and beside each other."""
    print(
        "\n| generating | the rest | step, synchronous | step, one ahead | of the larger half |\n|---|---|---|---|---|"
    )
    for generating, rest, alone, ahead in measured.values():
        cells = (f"{seconds:.2f} s" for seconds in (generating, rest, alone, ahead))
        print(f"| {' | '.join(cells)} | {ahead / max(generating, rest):.3f} |")


def print_embedded(runs: Mapping[str, Rows]) -> None:
    """Accuracy over rollouts, staleness and step time on the embedded task."""
    print("\n| rollouts trained | " + " | ".join(map(str, SHOWN)) + " | samples | staleness | s a step |")
    print("|" + "---|" * (len(SHOWN) + 4))
    for name, rows in runs.items():
        scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
        trained = [row for row in rows if "train/loss" in row]
        age = statistics.fmean(row.get("rollout/staleness/mean", 0.0) for row in trained)
        cells = [*(f"{scores[step]:.3f}" if step in scores else "" for step in SHOWN), f"{256 * len(trained)}"]
        print(f"| {EMBEDDED[name][0]} | {' | '.join(cells)} | {age:.2f} | {median(rows, 'step'):.2f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(RUNS))
