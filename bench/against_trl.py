"""Compares slime with TRL on the same jobs, in alternation: the table of docs/performance.md.

    make bench                                                  all rows, with TRL in an environment of its own
    python -m bench.against_trl outputs/trl PYTHON [ROW ...]    PYTHON: the interpreter of that environment

First equality: samples that a run recorded, with the log-probabilities of the weights they were sampled from, give both
the same advantages, loss and gradient at the initial weights. Then speed: same weights, prompts, rewards, batch,
optimizer and number of threads; a step lasts from the end of one to the end of the next. CPU seconds are the kernel's
counts of the whole process trees. Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.step import LEFT_OUT, steps, when
from slime_core.config.schema import ARITHMETIC
from slime_core.runtime.machine import cpu_threads
from slime_core.types import GroupedRewards
from slime_grpo.advantage import grpo
from slime_grpo.options import GrpoOptions

TOLERANCE = 1e-5
SMOLLM = Path("outputs/smollm2")


@dataclass(frozen=True)
class Row:
    """A job and its number of rounds."""

    model: Path
    data: Path
    reward: str
    flags: tuple[str, ...]
    """Flags of ``slime run``."""
    prompts: int
    samples: int
    tokens: int
    lr: float
    steps: int
    rounds: int
    left_out: int = LEFT_OUT
    bf16: bool = False


def smollm(*, bf16: bool) -> Row:
    """Return the job of examples/smollm2, with responses of at most 24 tokens."""
    flags = ("--config", "examples/smollm2/run.toml", "--bf16", str(bf16).lower())
    return Row(SMOLLM / "model", SMOLLM / "train.jsonl", "last_number", flags, 8, 8, 24, 3e-5, 3, 1, 1, bf16)


DEMO = ARITHMETIC / "model", ARITHMETIC / "data" / "train.jsonl", "exact", ("--plugin", "grpo"), 32, 8, 8
ROWS = {"demo": Row(*DEMO, 3e-4, 20, 3), "smollm2": smollm(bf16=False), "smollm2-bf16": smollm(bf16=True)}


def main() -> None:
    """Compare both sides' results, then time them."""
    parser = argparse.ArgumentParser(description="slime and TRL on the same jobs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("python", help="interpreter of an environment with TRL")
    parser.add_argument("rows", nargs="*", default=["demo"], help=", ".join(ROWS))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    equality(folder, arguments.python)
    print(
        "\n| job | s per step: slime | TRL | ratio | CPU s per step: slime | TRL | tokens per response: slime | TRL |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.rows:
        compare(name, ROWS[name], folder, arguments.python)
    print(f"\nload average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores at the end")


def equality(folder: Path, python: str) -> None:
    """Print the largest differences for frozen samples; end if one exceeds the tolerance."""
    row, num = ROWS["demo"], 6
    recorded = folder / "recorded"
    shutil.rmtree(recorded, ignore_errors=True)
    # A large rate, so that the weights that sampled the last rollout are far from those that are trained on it.
    first = ("--num-rollout", str(num), "--rollout-batch-size", "8", "--lr", "1e-3")
    run(folder / "records", *row.flags, *first, "--save-debug-rollout-data", f"{recorded}/{{rollout_id}}.jsonl")
    file = recorded / f"{num - 1}.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    names = {"tokens": "tokens", "reward": "reward", "log_probs": "rollout_log_probs"}
    given = [{ours: sample[name] for ours, name in names.items()} for sample in samples]
    print("| frozen samples | advantages | loss | gradient norm, relative | clipped tokens |\n|---|---|---|---|---|")
    for label, divides, scale, bound in (("centred", "false", "none", TOLERANCE), ("divided", "true", "group", 1e-3)):
        flags = ("--num-rollout", "1", "--rollout-batch-size", "8", "--load-debug-rollout-data", str(file))
        more = ("--use-rollout-logprobs", "--grpo.std-normalization", divides)
        run(folder / label, *row.flags, *flags, *more)
        ours = steps(folder / label)[0]
        theirs = peer(
            python, folder, {**job_of(row, folder), "prompts": 8, "reward": "given", "scale": scale, "frozen": given}
        )
        difference = float(np.abs(advantages(samples, divides == "true") - np.array(theirs["advantages"])).max())
        loss = abs(ours["train/loss"] - theirs["loss"])
        gradient = abs(ours["train/grad_norm"] / theirs["grad_norm"] - 1)
        print(
            f"| {label} | {difference:.1e} | {loss:.1e} | {gradient:.1e} | {ours['train/clip_fraction']:.3f} |",
            flush=True,
        )
        if max(difference, loss) > bound:
            raise SystemExit(f"{label}: a difference exceeds {bound}")


def advantages(samples: Sequence[dict[str, Any]], divides: bool) -> NDArray[np.float32]:
    """Return the advantages of slime-grpo's estimator, [B]."""
    rewards, groups = (np.array([sample[name] for sample in samples]) for name in ("reward", "group_index"))
    ones = np.ones(len(samples), dtype=np.int64)
    batch = GroupedRewards(rewards.astype(np.float32), groups, ones, ones)
    return grpo(batch, GrpoOptions(std_normalization=divides))


def compare(name: str, row: Row, folder: Path, python: str) -> None:
    """Measure both sides alternately; print medians."""
    found: dict[str, list[dict[str, list[float]]]] = {"ours": [], "theirs": []}
    for _ in range(row.rounds):
        found["ours"].append(measured(row, folder / name))
        job = {
            **job_of(row, folder),
            "steps": row.steps,
            "left_out": row.left_out,
            "data": str(row.data),
            "scale": "group",
        }
        found["theirs"].append(peer(python, folder, job))
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    cells = []
    for key in ("wall", "cpu", "response_tokens"):
        ours, theirs = ([value for one in found[side] for value in one[key]] for side in ("ours", "theirs"))
        cells.append((statistics.median(ours), statistics.median(theirs)))
    (wall, their_wall), (cpu, their_cpu), (tokens, their_tokens) = cells
    times = f"{wall:.3f} | {their_wall:.3f} | {wall / their_wall:.2f} | {cpu:.2f} | {their_cpu:.2f}"
    print(f"| {name} | {times} | {tokens:.1f} | {their_tokens:.1f} |", flush=True)


def job_of(row: Row, folder: Path) -> dict[str, Any]:
    """Return the fields that both jobs of TRL have."""
    names = ("prompts", "samples", "tokens", "lr", "bf16", "reward")
    same = {name: getattr(row, name) for name in names}
    return {"model": str(row.model), "folder": str(folder / "trl"), "threads": cpu_threads(), **same}


def peer(python: str, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run TRL's side; return its results."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    words = [python, str(Path(__file__).with_name("trl_trainer.py")), str(file)]
    threads = {"OMP_NUM_THREADS": str(job["threads"])}
    with (folder / "trl.log").open("w") as log:
        done = subprocess.run(words, env={**os.environ, **threads}, stdout=subprocess.PIPE, stderr=log, text=True)
    if done.returncode:
        raise SystemExit((folder / "trl.log").read_text()[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measured(row: Row, folder: Path) -> dict[str, list[float]]:
    """Return slime's wall seconds of every step, its mean CPU seconds, and lengths in tokens."""
    last = row.left_out + row.steps
    shutil.rmtree(folder, ignore_errors=True)
    shape = ("--rollout-batch-size", row.prompts, "--n-samples-per-prompt", row.samples)
    lengths = ("--rollout-max-response-len", row.tokens, "--num-rollout", last + 1)
    words = command(folder, *row.flags, *map(str, (*shape, *lengths)))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    before = when(process, folder, row.left_out)
    ends = list(ends_of_steps(process, folder, row.left_out, last))
    after = when(process, folder, last)
    process.wait()
    used = sum(after[name] - before[name] for name in after) / row.steps
    wall = [end - start for start, end in pairwise(ends)]
    rows = steps(folder)[row.left_out : last]
    return {"wall": wall, "cpu": [used], "response_tokens": [one["rollout/response_len/mean"] for one in rows]}


def ends_of_steps(process: subprocess.Popen[bytes], folder: Path, first: int, last: int) -> Iterator[float]:
    """Yield the time at which each step wrote its row."""
    size = -1
    for count in range(first, last + 1):
        while size < 0 or len(steps(folder)) < count:  # rows are read only where the file has grown: cores are few
            if process.poll() is not None:
                raise SystemExit(f"the run ended after {len(steps(folder))} steps, with {process.returncode}")
            while (grown := (folder / "metrics.jsonl").stat().st_size) == size and process.poll() is None:
                time.sleep(0.002)
            size = grown
        yield time.perf_counter()


def run(folder: Path, *flags: str) -> None:
    """Run ``slime run`` to its end in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(command(folder, *flags), check=True, stdout=subprocess.DEVNULL)


def command(folder: Path, *flags: str) -> list[str]:
    """Return the command of a run that does not evaluate."""
    fixed = ("--device", "cpu", "--eval-prompt-data", "none", "--eval-interval", "none", "--progress", "none")
    return [sys.executable, "-m", "slime_core", "run", *flags, *fixed, "--output-dir", str(folder)]


if __name__ == "__main__":
    main()
