"""Measures how the sampler scales: samples per second and core, bytes per token; and the balance of ranks.

    python -m bench.growth                              the sampler: the tables of docs/scale.md, a few minutes
    python -m bench.growth balance                      padding and imbalance of recorded rollouts over 8 ranks
    python -m bench.growth calls                        what ranks cost the driver, and engines a weight update
    python -m bench.growth --model FOLDER --prompts FILE    another tokenizer

The sampler of a run collects one rollout from engines that answer at once (:mod:`bench.growth_engines`) and makes the
shards of 8 ranks: everything that its actor does, in this process, with the actor's event loop, samples file and
ledger, but without Ray. Each row is a fresh process, the sizes in turn, and the median of the rounds is printed. CPU
seconds are the kernel's, of all threads of that process; the engines' are not among them. What a step costs the driver
is a row of ``bench.step``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import uvloop

from bench.growth_balance import balance_table
from bench.growth_calls import calls_table
from bench.growth_engines import engines
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.model_config import described
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.plugins.activation import activate
from slime_core.plugins.registry import Registry
from slime_core.rollout.actor import ALLOCATIONS
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler
from slime_core.runtime.actors import uncollected

RANKS = 8
WARM = 128
"""Number of samples before measuring, which cover imports and the first use of the tokenizer."""

HEAD = """| samples | s of a core | samples/s per core | wall s | connections | bytes per token: shards | peak |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of the sampler.

    Arguments:
        samples: number of samples in the rollout.
        engines: number of engines.
        in_flight: limit on samples that the engines hold.
        group: samples per prompt, which share a request.
        tokens: length of a response.
        model, prompts: the tokenizer, and the prompt file; prompts are rendered with the chat template.
    """

    samples: int
    engines: int
    in_flight: int
    group: int
    tokens: int
    model: Path
    prompts: Path

    def settings(self, urls: list[str], folder: Path, *, samples: int) -> SamplerSettings:
        """Return settings of a sampler that uses these engines and writes its samples as a run does."""
        rollout = RolloutConfig(
            rollout_batch_size=samples // self.group,
            n_samples_per_prompt=self.group,
            rm_type="random",
            rollout_max_response_len=self.tokens,
            sglang_server_concurrency=-(-self.in_flight // self.engines),
        )
        config = RunConfig(
            data=DataConfig(apply_chat_template=True),
            rollout=rollout,
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
        )
        return SamplerSettings(
            config,
            self.model,
            self.prompts,
            urls[0],
            num_ranks=RANKS,
            samples_folder=folder,
            num_engines=self.engines,
            engine_urls=tuple(urls),
        )


async def collected(settings: SamplerSettings, registry: Registry) -> dict[str, float]:
    """Generate one rollout with a new sampler; return its seconds, bytes and connections."""
    with uncollected(allocations=ALLOCATIONS):  # as its actor does
        sampler = TrainSampler(settings, registry)
    before, clear = psutil.Process().memory_info().rss, Path("/proc/self/clear_refs")
    clear.write_text("5")  # the peak of the resident set starts here
    clock, core = time.monotonic(), time.process_time()
    sampled = await sampler.sample(0)
    sent = [pickle.dumps(shard, protocol=5) for shard in sampled.shards]  # as Ray does
    clock, core = time.monotonic() - clock, time.process_time() - core
    peak = next(int(one.split()[1]) for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one)
    tokens = sampled.metrics["rollout/tokens"]
    sockets = sum(os.readlink(one).startswith("socket:") for one in _open_files())
    await sampler.close()
    return {
        "core": core,
        "clock": clock,
        "sockets": float(sockets),
        "sent": sum(map(len, sent)) / tokens,
        "peak": (peak * 1024 - before) / tokens,
    }


def _open_files() -> list[str]:
    folder = "/proc/self/fd"
    return [path for name in os.listdir(folder) if os.path.lexists(path := f"{folder}/{name}")]


def measured(job: Job) -> dict[str, float]:
    """Measure a rollout in this process, after a small one as warm-up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    registry, vocab_size = activate(["datasets", "grpo"]).registry, int((described(job.model) or {})["vocab_size"])
    with engines(job.engines, vocab_size=vocab_size) as urls, tempfile.TemporaryDirectory() as folder:
        for place, samples in enumerate((WARM, job.samples)):
            settings = job.settings(urls, Path(folder) / str(place), samples=samples)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop of Ray's actors
                found = runner.run(collected(settings, registry))
    return found


def growth_table(given: argparse.Namespace) -> None:
    """Measure each size in a fresh process, in turn, and print the medians."""
    found: dict[int, list[dict[str, Any]]] = {samples: [] for samples in given.samples}
    for _ in range(given.rounds):
        for samples, rows in found.items():
            command = [sys.executable, "-m", "bench.growth", *sys.argv[1:], "--one", str(samples)]
            rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    print(f"{given.rounds} rounds; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores\n\n{HEAD}")
    for samples, rows in found.items():
        core, clock, sockets, sent, peak = (
            statistics.median(row[name] for row in rows) for name in ("core", "clock", "sockets", "sent", "peak")
        )
        row = [f"{samples:,}", f"{core:.2f}", f"{samples / core:,.0f}", f"{clock:.2f}", f"{sockets:,.0f}"]
        print(f"| {' | '.join([*row, f'{sent:.1f}', f'{peak:.0f}'])} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("sampler", "balance", "calls"), default="sampler")
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=32_768, help="samples in flight")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt; 1: a request for every sample")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ARITHMETIC / "model")
    parser.add_argument("--prompts", type=Path, default=ARITHMETIC / "data" / "train.jsonl")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "balance":
        balance_table(RANKS)
    elif given.part == "calls":
        calls_table()
    elif given.one is None:
        growth_table(given)
    else:
        named = {name: getattr(given, name) for name in Job.__slots__ if name != "samples"}
        print(json.dumps(measured(Job(samples=given.one, **named))))


if __name__ == "__main__":
    main()
