"""Measures ``examples/smollm2``: the run, its control with random rewards, and the parity in float32.

    python -m campaigns.smollm2 FOLDER        about an hour on two cores; finished runs are only read

Needs what ``make smollm`` writes. Prints the tables of ``examples/smollm2/README.md``, writes the numbers to
``examples/smollm2/curve.json``, and ends with an error if the run did not learn or the control did.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"
COMMAND = ("run", "--config", "examples/smollm2/run.toml")
ONLY_TRAINS = ("--skip-eval-before-train", "true", "--eval-interval", "1000")
RUNS: dict[str, tuple[str, ...]] = {
    "main": (),
    # Its evaluations would be scored with coins too: its checkpoints are measured instead.
    "random": ("--rm-type", "random", "--save-interval", "10", *ONLY_TRAINS),
    "float32": ("--bf16", "false", "--num-rollout", "2", "--rollout-batch-size", "4", *ONLY_TRAINS),
}
"""Name of a run's folder -> its flags in addition to COMMAND."""

NAME = "eval/arithmetic"
KINDS = ("", "/kind=sum", "/kind=product")
PARITY = {"mean": "train/train_rollout_logprob_abs_diff", "max": "train/train_rollout_logprob_max_diff"}


def main(folder: Path) -> None:
    """Run what is missing, then print and write everything."""
    for name, flags in RUNS.items():
        if not finished(folder / name):
            slime(*COMMAND, "--progress", "lines", "--output-dir", str(folder / name), *flags)
    curve = {
        "command": " ".join(("slime", *COMMAND)),
        "control": " ".join(("slime", *COMMAND, *RUNS["random"][:2])),
        "seed": 0,
        "machine": "2 cores",
        "main": accuracies(read(folder / "main")),
        "random": {"0": accuracies(read(folder / "main"))["0"], **checkpoint_accuracies(folder / "random")},
        "steps": {name: steps(read(folder / name)) for name in RUNS},
        "parity": {name: parity(read(folder / name)) for name in RUNS},
    }
    (EXAMPLE / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    print_tables(curve)
    sys.exit("\n".join(missed(curve)) or 0)


def finished(run: Path) -> bool:
    """Whether the run has a checkpoint of its last step."""
    num_steps = len(steps(read(run)))
    return num_steps > 0 and (run / "checkpoints" / f"step-{num_steps:06d}").exists()


def slime(*words: str) -> str:
    """The output of one command, which has to succeed; it is shown as well."""
    command = [sys.executable, "-m", "slime_core", *words]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        lines = [show(line) for line in process.stdout or ()]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return "".join(lines)


def show(line: str) -> str:
    print(line, end="", flush=True)
    return line


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; none, if there are none yet."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(rows: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """What is plotted of every optimizer step."""
    return [
        {
            "reward": round(row["rollout/raw_reward"], 4),
            "zero_std_groups": round(row["rollout/zero_std_groups"], 4),
            "grad_norm": round(row["train/grad_norm"], 3),
            "seconds": round(row["perf/step_time"], 1),
            **{name: float(f"{row[key]:.2e}") for name, key in PARITY.items()},
        }
        for row in rows
        if "train/loss" in row
    ]


def accuracies(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Optimizer steps taken -> held-out accuracy, of all problems and of each kind."""
    return {
        str(row["step"]): {kind.removeprefix("/kind=") or "all": row[NAME + kind] for kind in KINDS}
        for row in rows
        if NAME in row
    }


def checkpoint_accuracies(run: Path) -> dict[str, dict[str, float]]:
    """As :func:`accuracies`, of a run's checkpoints, scored by the reward of the example."""
    found: dict[str, dict[str, float]] = {}
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        kept = run / f"{checkpoint.name}.txt"
        if not kept.exists():
            kept.write_text(slime("eval", str(checkpoint), "--rm-type", "last_number"))
        lines = kept.read_text().splitlines()
        scores = {name: float(score) for name, score in (line.split(": ") for line in lines if line.startswith(NAME))}
        found |= accuracies([{"step": int(checkpoint.name.removeprefix("step-")), **scores}])
    return found


def parity(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Absolute difference of the log-probs of trainer and engine: mean over the steps, largest single token."""
    trained = steps(rows)
    return {"mean": statistics.fmean(step["mean"] for step in trained), "max": max(step["max"] for step in trained)}


def print_tables(curve: dict[str, Any]) -> None:
    """The tables of the README."""
    print("\n| optimizer steps | all | sums | products | control: all |\n|---|---|---|---|---|")
    for step in sorted({*curve["main"], *curve["random"]}, key=int):
        main_run, control = curve["main"].get(step, {}), curve["random"].get(step, {})
        cells = [cell(main_run, kind) for kind in ("all", "sum", "product")] + [cell(control, "all")]
        print(f"| {step} | {' | '.join(cells)} |")
    print("\n| | mean | largest single token | seconds a step, median |\n|---|---|---|---|")
    for name, numbers in curve["parity"].items():
        usual = statistics.median(step["seconds"] for step in curve["steps"][name])
        print(f"| {name} | {numbers['mean']:.1e} | {numbers['max']:.1e} | {usual:.0f} |")


def cell(scores: dict[str, float], kind: str) -> str:
    """A number of the table; nothing where nothing was measured."""
    return f"{scores[kind]:.3f}" if scores else ""


def missed(curve: dict[str, Any]) -> list[str]:
    """What does not hold of what the README says."""
    start = curve["main"]["0"]["all"]
    ends = {name: list(curve[name].values())[-1]["all"] for name in ("main", "random")}
    found = [] if ends["main"] > start else [f"the run ends at {ends['main']}, not above its start, {start}"]
    found += [f"the control ends at {ends['random']}, above the start, {start}"] if ends["random"] > start else []
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
