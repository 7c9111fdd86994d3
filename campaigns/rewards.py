"""A live run whose reward model misbehaves in every way for a few samples, and the table of docs/rewards.md.

    python -m campaigns.rewards FOLDER [--rollouts N]        about a minute on two idle cores
    python -m campaigns.rewards FOLDER --sampler-only        no learner, no Ray, a fake engine

The run is the default one, with real engines; its reward model is ``misbehaving_reward.py``, by file, as a user has it.
Of the 64 samples of a rollout five are scored by something that hangs, crashes, eats memory, returns NaN or raises. The
table says what became of each, and the exit code whether each cost its own sample and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from campaigns.misbehaving_reward import CAUSES, WAYS
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.plugins.activation import activate
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler
from slime_testing.fake_engine import FakeEngine

PLUGIN = Path(__file__).parent / "misbehaving_reward.py"
BATCH, GROUP = 8, 8
LIMIT_S = 1200
TIMEOUT_S, MEMORY_GIB = 5, 0.5

Rows = list[dict[str, Any]]


def main(folder: Path, rollouts: int, *, sampler_only: bool) -> int:
    """Print the table; 0 where every misbehaviour cost its own sample alone in every rollout."""
    metrics = asyncio.run(sampled(folder, rollouts)) if sampler_only else run(folder, rollouts)
    samples = [rows(path) for path in sorted((folder / "samples").glob("train-*.jsonl"))]
    print("| reward | cause in the metrics | samples lost a rollout | what the sample says |")
    print("|---|---|---|---|")
    failed = Counter(one["index"] % (BATCH * GROUP) for step in samples for one in step if one["status"] == "failed")
    for place, way in WAYS.items():
        print(f"| {way} | `{CAUSES[way]}` | {lost(metrics, CAUSES[way])} | {error_text(samples, place)} |")
    others = sum(count for place, count in failed.items() if place not in WAYS)
    trained = [sum(one["status"] != "failed" for one in step) for step in samples]
    print(f"\n{len(metrics)} rollouts of {BATCH * GROUP} samples; trained on: {trained}; others lost: {others}.")
    print(f"Seconds a rollout: {[round(row['perf/rollout_time'], 1) for row in metrics if 'perf/rollout_time' in row]}")
    is_kept = others == 0 and all(count == BATCH * GROUP - len(WAYS) for count in trained)
    return 0 if is_kept and len(metrics) == len(samples) == rollouts else 1


async def sampled(folder: Path, rollouts: int) -> Rows:
    """The metrics of rollouts that a sampler of its own makes."""
    settings = RolloutConfig(
        rollout_batch_size=BATCH,
        n_samples_per_prompt=GROUP,
        rm_type="misbehaving",
        rollout_max_response_len=8,
        reward_timeout_s=TIMEOUT_S,
        reward_memory_gib=MEMORY_GIB,
    )
    config = RunConfig(rollout=settings, algorithm=AlgorithmConfig(advantage_estimator="grpo"))
    active = activate(["datasets", "grpo", str(PLUGIN)])
    with FakeEngine() as engine:
        folder.mkdir(parents=True, exist_ok=True)
        start = SamplerSettings(
            config,
            ARITHMETIC / "model",
            ARITHMETIC / "data" / "train.jsonl",
            engine.url,
            samples_folder=folder / "samples",
            rewards_log=folder / "rewards.log",
        )
        sampler = TrainSampler(start, active.registry, manifest=active.manifest)
        try:
            return [await timed(sampler, rollout) for rollout in range(rollouts)]
        finally:
            await sampler.close()


async def timed(sampler: TrainSampler, rollout: int) -> dict[str, Any]:
    """The metrics of one rollout, and the seconds that it took."""
    started_s = time.monotonic()
    found = await sampler.sample(rollout)
    return {**found.metrics, "perf/rollout_time": time.monotonic() - started_s}


def run(folder: Path, rollouts: int) -> Rows:
    """The metrics of every step of a run.

    Raises:
        SystemExit: it failed, which no reward may cause.
    """
    flags = (
        f"--plugin grpo --plugin {PLUGIN} --device cpu --rm-type misbehaving --num-rollout {rollouts} "
        f"--rollout-batch-size {BATCH} --n-samples-per-prompt {GROUP} --global-batch-size {BATCH * GROUP} "
        f"--reward-timeout-s {TIMEOUT_S} --reward-memory-gib {MEMORY_GIB} --skip-eval-before-train "
        f"--eval-interval 1000 --output-dir {folder} --progress none"
    )
    command = [sys.executable, "-m", "slime_core", "run", *flags.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ended.returncode:
        raise SystemExit(f"the run ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")

    return [row for row in rows(folder / "metrics.jsonl") if "rollout/raw_reward" in row]


def rows(path: Path) -> Rows:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def lost(metrics: Rows, cause: str) -> str:
    """How many samples of each step were lost for that cause."""
    return " ".join(f"{row.get(f'rollout/reward_failures/{cause}', 0):g}" for row in metrics)


def error_text(samples: list[Rows], place: int) -> str:
    """The error of the first sample at that place."""
    texts = [one.get("error", "") for step in samples for one in step if one["index"] % (BATCH * GROUP) == place]
    return re.sub(r"printed is in .*", "printed is in logs/rewards.log", (texts or [""])[0]).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--sampler-only", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.folder.resolve(), given.rollouts, sampler_only=given.sampler_only))
