"""Runs the embedded task for a few steps in every layout and over every transport, and prints what came of it.

    python -m campaigns.live_layouts FOLDER [NAME ...]    ten minutes on two cores; finished runs are only read

The model is the embedded one with a fourth layer that adds nothing, so that a pipeline of two has two layers a rank.
Each run has the parity gate and the comparison of weights on. A row says which processes there were, and how far the
log-probabilities of learner and engines differed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from slime_core.config.schema import ARITHMETIC

STEPS = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """One run: how many learner ranks and engine processes, and the flags that say how they are used."""

    learner: int = 1
    generating: int = 1
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Flags of ``slime run``."""
        ranks = ["--actor-num-gpus-per-node", str(self.learner), "--rollout-num-gpus", str(self.generating)]
        return [*ranks, *self.flags]


TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
CONTEXT = ("--context-parallel-size", "2")
ENGINE = ("--rollout-num-gpus-per-engine", "2")

LAYOUTS: dict[str, Layout] = {
    "one rank": Layout(),
    "data 2, two engines": Layout(2, 2),
    "tensor 2": Layout(2, 1, TENSOR),
    "tensor 2, sequence": Layout(2, 1, (*TENSOR, "--sequence-parallel")),
    "tensor 2, two engines": Layout(2, 2, TENSOR),
    "pipeline 2": Layout(2, 1, PIPELINE),
    "pipeline 2, two engines, disk": Layout(2, 2, (*PIPELINE, "--update-weight-transport", "disk")),
    "pipeline 2, interleaved": Layout(2, 1, (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")),
    "context 2": Layout(2, 1, CONTEXT),
    "context 2, two engines": Layout(2, 2, CONTEXT),
    "tensor 2, context 2": Layout(4, 1, (*TENSOR, *CONTEXT)),
    "tensor 2, data 2": Layout(4, 1, TENSOR),
    "engine tensor 2": Layout(1, 2, ENGINE),
    "engine tensor 2, disk": Layout(1, 2, (*ENGINE, "--update-weight-transport", "disk")),
    "colocated": Layout(1, 1, ("--colocate",)),
    "colocated, data 2, two engines": Layout(2, 2, ("--colocate",)),
    "colocated, tensor 2, engine tensor 2": Layout(2, 2, ("--colocate", *TENSOR, *ENGINE)),
    "colocated, distributed": Layout(1, 1, ("--colocate", "--update-weight-transport", "distributed")),
    "bfloat16, tensor 2": Layout(2, 1, ("--bf16", *TENSOR)),
}
"""Name -> layout."""


def main(folder: Path, names: list[str]) -> int:
    """Run what is missing and print the table; the number of runs that failed."""
    deepen(ARITHMETIC / "model", folder / "model")
    print(
        "| layout | learner ranks | engine processes | reward, first and last step | log-prob difference, mean | "
        "largest |"
    )
    print("|---|---|---|---|---|---|")
    return sum(not row(name, LAYOUTS[name], folder) for name in names or LAYOUTS)


def row(name: str, layout: Layout, folder: Path) -> bool:
    """Print one line of the table; whether the run succeeded."""
    output = folder / name.replace(", ", "-").replace(" ", "-")
    problem = "" if is_finished(output) else train(output, layout, model=folder / "model")
    if problem:
        print(f"| {name} | {layout.learner} | {layout.generating} | failed: {problem} | | |", flush=True)
        return False
    rows = [row for row in read(output) if "train/loss" in row]
    rewards = " -> ".join(f"{rows[step]['rollout/raw_reward']:.3f}" for step in (0, -1))
    mean = max(row["parity/mean"] for row in rows)
    largest = max(row["parity/max"] for row in rows)
    print(f"| {name} | {layout.learner} | {layout.generating} | {rewards} | {mean:.1e} | {largest:.1e} |", flush=True)
    return True


def deepen(source: Path, target: Path) -> None:
    """Write the model of ``source`` with one more layer whose output is zero: the same function, another depth."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    depth = config["num_hidden_layers"]
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if f".layers.{depth - 1}." in name]:
        adds_to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        weights[name.replace(f".layers.{depth - 1}.", f".layers.{depth}.")] = weights[name] * (not adds_to_stream)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    deeper = config | {"num_hidden_layers": depth + 1, "max_window_layers": depth + 1}
    (target / "config.json").write_text(json.dumps(deeper, indent=2))


def settings(model: Path) -> list[str]:
    """Flags of all runs."""
    data = ["--hf-checkpoint", str(model), "--prompt-data", str(ARITHMETIC / "data" / "train.jsonl")]
    steps = ["--rollout-max-response-len", "8", "--apply-chat-template", "--lr", "3e-4", "--num-rollout", str(STEPS)]
    batch = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "8"]
    return ["--plugin", "grpo", *data, *batch, *steps, "--check-weight-update-equal"]


def train(output: Path, layout: Layout, *, model: Path) -> str:
    """Run a few steps; what went wrong, or nothing."""
    words = [*settings(model), "--output-dir", str(output), "--progress", "none", *layout.arguments]
    command = [sys.executable, "-m", "slime_core", "run", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stderr.strip().splitlines()[0] if ended.returncode else ""


def is_finished(run: Path) -> bool:
    """Whether a run has its last checkpoint."""
    return (run / "checkpoints" / f"step-{STEPS:06d}").exists()


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))
