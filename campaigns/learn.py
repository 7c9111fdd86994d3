"""Runs the built-in task with every estimator and with negative controls, and prints the tables of docs/results.md.

    python -m campaigns.learn FOLDER [NAME ...]     without names all runs; finished runs are only read

An interrupted run resumes from its last checkpoint. Each negative control lacks one thing: meaningful rewards, the
learning rate, the weight updates. None may learn. FOLDER/curves.svg shows every run's accuracy.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from campaigns.curves import plot

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One run: its flags for ``slime run``, its label in the tables, and the expected outcome.

    ``rises``: accuracy rises by at least RISE. ``stays``: it must not learn. ``shown``: no expectation.
    """

    label: str
    flags: str
    outcome: Literal["rises", "stays", "shown"] = "rises"


def _estimator(plugin: str, name: str, seed: int = 0, more: str = "") -> Run:
    label = f"`{name}`, seed {seed}" if seed or name in ("grpo", "ppo") else f"`{name}`"
    return Run(label, f"--plugin {plugin} --advantage-estimator {name} --seed {seed} {more}".strip())


GSPO_CLIP = "--eps-clip 3e-4 --eps-clip-high 4e-4"
STALE = "--plugin grpo --update-weights-interval 3"
AHEAD = "--plugin grpo --async-buffer-size 2 --max-staleness 2"
RUNS: Mapping[str, Run] = {
    **{f"grpo-{seed}": _estimator("grpo", "grpo", seed) for seed in range(3)},
    **{f"ppo-{seed}": _estimator("ppo", "ppo", seed) for seed in range(3)},
    "dr-grpo": _estimator("grpo", "dr_grpo", more="--loss-token-divisor 8"),
    "rloo": _estimator("grpo", "rloo"),
    "gspo": _estimator("grpo", "gspo", more=GSPO_CLIP),
    "cispo": _estimator("grpo", "cispo"),
    "reinforce-plus-plus": _estimator("ppo", "reinforce_plus_plus", more="--kl-coef 0.01"),
    "reinforce-plus-plus-baseline": _estimator("ppo", "reinforce_plus_plus_baseline"),
    "stale": Run("`grpo`, weights up to 2 rollouts old", f"{STALE} --seed 0", outcome="shown"),
    "stale-tis": Run("the same with `tis`", f"{STALE} --seed 0 --corrections tis", outcome="shown"),
    "async": Run("`grpo`, generated ahead of training, at most 2 rollouts", f"{AHEAD} --seed 0"),
    "async-tis": Run("the same with `tis`, ahead", f"{AHEAD} --seed 0 --corrections tis"),
    "random": Run("random rewards", "--plugin grpo --seed 0 --rm-type random", outcome="stays"),
    "lr-0": Run("learning rate 0", "--plugin grpo --seed 0 --lr 0", outcome="stays"),
    "frozen": Run("engines never updated", "--plugin grpo --seed 0 --update-weights-interval 0", outcome="stays"),
}
"""Name of a run's folder -> the run."""

SEEDS = ("grpo-0", "grpo-1", "grpo-2")
KINDS = ("", "/carries=0", "/carries=1", "/carries=2", "/digits=1+1", "/digits=1+2", "/digits=2+1", "/digits=2+2")
SCORE = "eval/arithmetic"
NUM_ROLLOUTS = 80
RISE, DRIFT = 0.25, 0.10
"""How much accuracy has to rise; how far above the start random rewards may end."""

EDGE = 5
"""Rows at the start and at the end of a run that are averaged."""


def main(folder: Path, names: Sequence[str]) -> None:
    """Run what is missing, then print everything."""
    for name in names:
        carry_out(RUNS[name], folder / name)
    runs = {name: read(folder / name) for name in names}
    scores = {name: curve(folder / name, name, rows) for name, rows in runs.items()}
    print_learning(scores)
    plot(folder / "curves.svg", {RUNS[name].label.replace("`", ""): points for name, points in scores.items()})
    if set(SEEDS) <= runs.keys():
        print_kinds([runs[name] for name in SEEDS])
        print_times(runs[SEEDS[0]])
    print_controls({name: rows for name, rows in runs.items() if RUNS[name].outcome == "stays"})
    print_parity(runs)
    sys.exit("\n".join(missed(scores)) or 0)


def carry_out(run: Run, folder: Path) -> None:
    """Train, or go on, unless the last checkpoint is there."""
    if (folder / "checkpoints" / f"step-{NUM_ROLLOUTS:06d}").exists():
        return
    has_checkpoint = any((folder / "checkpoints").glob("step-*"))
    where = ("--load", str(folder)) if has_checkpoint else ("--output-dir", str(folder), "--save-interval", "20")
    print(f"{folder.name}: {'resuming' if has_checkpoint else 'training'}", file=sys.stderr, flush=True)
    slime("run", *run.flags.split(), "--progress", "none", "--eval-interval", "10", *where)


def missed(scores: Mapping[str, dict[int, float]]) -> list[str]:
    """What does not hold of what the documentation says."""
    found = []
    for name, points in scores.items():
        start, end = points[0], points[max(points)]
        if RUNS[name].outcome == "rises" and end < start + RISE:
            found.append(f"{name} ends at {end:.3f}, which is not {RISE} above its start at {start:.3f}")
        if name == "random" and end > start + DRIFT:
            found.append(f"random rewards end at {end:.3f}, over the start at {start:.3f} by more than {DRIFT}")
        if name in ("lr-0", "frozen") and end != start:
            found.append(f"{name} moved from {start:.3f} to {end:.3f}")
    return found


def curve(folder: Path, name: str, rows: Rows) -> dict[int, float]:
    """Rollouts trained -> accuracy of the engines. Of the random run, which scores with coins, only start and end."""
    if name != "random":
        return {row["step"]: row[SCORE] for row in rows if SCORE in row}
    return {0: accuracy("--plugin", "grpo"), NUM_ROLLOUTS: accuracy(str(folder), "--rm-type", "exact_match")}


def slime(*words: str) -> str:
    """The output of one command, which has to succeed."""
    return subprocess.run(
        [sys.executable, "-m", "slime_core", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def read(run: Path) -> Rows:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def accuracy(*words: str) -> float:
    """What ``slime eval`` prints."""
    output = slime("eval", *words).splitlines()
    return float(next(line.split()[1] for line in output if line.startswith(f"{SCORE}:")))


def trained(rows: Rows) -> Rows:
    """The rows that trained."""
    return [row for row in rows if "train/loss" in row]


def print_learning(scores: Mapping[str, dict[int, float]]) -> None:
    """Accuracy of every run over its rollouts."""
    steps = (0, 10, 20, 40, NUM_ROLLOUTS)
    print("\n| rollouts trained | " + " | ".join(map(str, steps)) + " |\n|" + "---|" * (len(steps) + 1))
    for name, points in scores.items():
        cells = (f"{points[step]:.3f}" if step in points else "" for step in steps)
        print(f"| {RUNS[name].label} | " + " | ".join(cells) + " |")


def print_kinds(seeds: Sequence[Rows]) -> None:
    """Start and end by difficulty, of three seeds."""
    print("\n| | start | " + " | ".join(SEEDS) + " |\n|---|---|---|---|---|")
    for kind in KINDS:
        ends = " | ".join(f"{rows[-1][SCORE + kind]:.3f}" for rows in seeds)
        print(f"| {kind.removeprefix('/') or 'all'} | {seeds[0][0][SCORE + kind]:.3f} | {ends} |")


def print_controls(runs: Mapping[str, Rows]) -> None:
    """Rewards of the runs that must not learn."""
    print("\n| control | reward, first rows | reward, last rows |\n|---|---|---|")
    for name, rows in runs.items():
        first, last = (mean_reward(part) for part in (trained(rows)[:EDGE], trained(rows)[-EDGE:]))
        print(f"| {RUNS[name].label} | {first:.3f} | {last:.3f} |")


def mean_reward(rows: Rows) -> float:
    """Mean reward over these rows."""
    return statistics.fmean(row["rollout/raw_reward"] for row in rows)


def print_parity(runs: Mapping[str, Rows]) -> None:
    """Difference of log-probs between trainer and engine: over all rows, and in the last one."""
    print("\n| | mean over the rows | largest single token | mean of the last row |\n|---|---|---|---|")
    for name, rows in runs.items():
        means = [row["train/train_rollout_logprob_abs_diff"] for row in trained(rows)]
        largest = max(row["train/train_rollout_logprob_max_diff"] for row in trained(rows))
        print(f"| {RUNS[name].label} | {statistics.fmean(means):.1e} | {largest:.1e} | {means[-1]:.1e} |")


def print_times(rows: Rows) -> None:
    """Shares of a step, medians without the first and the last row."""
    middle = trained(rows)[1:-1]
    print("\n| part of a step | share |\n|---|---|")
    for part in ("rollout", "train", "update_weights"):
        share = statistics.median(row[f"perf/{part}_time"] / row["perf/step_time"] for row in middle)
        print(f"| {part} | {share:.2f} |")
    usual = statistics.median(row["perf/step_time"] for row in middle)
    print(f"\nfirst step to the median step: {trained(rows)[0]['perf/step_time'] / usual:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(RUNS))
