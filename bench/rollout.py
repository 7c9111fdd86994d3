"""Tokens per second of a rollout through slime's sampler, compared with a bare client of the same server and prompts.

    python -m bench.rollout [demo] [smollm2] [--rounds 7]       with `make smollm` before; about six minutes

Both sides ask one real SGLang server on this machine's CPU, in turn, from one process with one event loop. The sampler
is that of a run, with everything but Ray: data source, group scheduler, client, the router in front of the server,
rewards (those of ``smollm2`` in processes of their own), advantages, samples file, ledger and pickled shards. The bare
client is aiohttp: it sends the same token ids to the server itself, with the same sampling parameters, as many samples
per request and as many samples in flight, asks for log-probabilities as well, and parses the answers. Responses ignore
the end of sequence, so both sides generate equally many tokens. The server's prefix cache is emptied before each side,
as a weight update does. The first round warms up and does not count.

The ratio is that of tokens per second, slime's over the bare client's, the median of all rounds. CPU seconds of the
client are those of this process and of reward processes; those of all include the server's and the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import uvloop

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.plugins.activation import activate
from slime_core.rollout.actor import ALLOCATIONS
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterClient, RouterSettings, SGLangServer, Worker
from slime_core.rollout.sampler import TrainSampler
from slime_core.runtime.actors import uncollected
from slime_core.runtime.machine import cpu_threads
from slime_core.types import TrainBatch

IN_FLIGHT = 64
"""Limit on the samples in flight of a side."""

SMOLLM = Path("outputs/smollm2")
HEAD = """
| model | samples x tokens | slime, tokens/s (least to most) | bare client | ratio (least to most) \
| CPU s, client: slime | bare | CPU s, all: slime | bare |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement: ``prompts`` x ``group`` responses of exactly ``tokens`` tokens."""

    model: Path
    data: Path
    plugins: tuple[str, ...]
    reward: str
    prompts: int
    tokens: int
    group: int = 8

    def config(self) -> RunConfig:
        """Return settings of a run that generates them."""
        rollout = RolloutConfig(
            rollout_batch_size=self.prompts,
            n_samples_per_prompt=self.group,
            rm_type=self.reward,
            rollout_max_response_len=self.tokens,
            sglang_server_concurrency=IN_FLIGHT,
        )
        return RunConfig(
            data=DataConfig(apply_chat_template=True),
            rollout=rollout,
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
        )


DEMO = ARITHMETIC / "model", ARITHMETIC / "data" / "train.jsonl"
JOBS = {
    "demo": Job(model=DEMO[0], data=DEMO[1], plugins=("grpo",), reward="exact_match", prompts=32, tokens=8),
    "smollm2": Job(
        model=SMOLLM / "model",
        data=SMOLLM / "train.jsonl",
        plugins=("grpo", "examples/smollm2/reward.py"),
        reward="last_number",
        prompts=16,
        tokens=32,
    ),
}


@dataclass(frozen=True, slots=True)
class Side:
    """Costs of one rollout of one side."""

    tokens: int
    seconds: float
    cpu: tuple[float, float]
    """CPU seconds of the client, and of all processes."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main() -> None:
    """Measure every job, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help=", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(HEAD, flush=True)
    for name in given.jobs:
        print_row(name, JOBS[name], measure(JOBS[name], rounds=given.rounds))
    print(f"\n{given.rounds} rounds; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores at the end")


def measure(job: Job, *, rounds: int) -> list[tuple[Side, Side]]:
    """Return the costs of each side in each round, slime first."""
    with (
        tempfile.TemporaryDirectory(prefix="slime-bench-") as name,
        served(job, Path(name)) as urls,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,  # the loop of Ray's actors
    ):
        return runner.run(alternate(job, *urls, Path(name), rounds=rounds))


@contextmanager
def served(job: Job, folder: Path) -> Iterator[tuple[str, str]]:
    """Start a router and a server as a run does; yields their URLs."""
    settings = EngineSettings(job.model, folder / "engine.log", dtype="float32", threads=cpu_threads())
    with SGLangServer(settings) as server:
        server.wait_ready()
        with Router(RouterSettings(folder / "router.log")) as router:
            router.wait_ready()
            client = RouterClient(router.url)
            client.add([Worker(server.url)])
            client.wait_registered([server.url])
            yield router.url, server.url


async def alternate(job: Job, router: str, server: str, folder: Path, *, rounds: int) -> list[tuple[Side, Side]]:
    """Measure in one event loop, the sides alternately."""
    active = activate(["datasets", *job.plugins])
    data = folder / "prompts.jsonl"
    data.write_text("".join(fixed_lengths(job.data, (rounds + 1) * job.prompts)), encoding="utf-8")
    settings = SamplerSettings(job.config(), job.model, data, router, samples_folder=folder / "samples")
    with uncollected(allocations=ALLOCATIONS):  # as its actor does
        sampler = TrainSampler(settings, active.registry, manifest=active.manifest)
    found: list[tuple[Side, Side]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds + 1):
            await empty_cache(session, server)
            ours, shards = await sampled(sampler, number)
            await empty_cache(session, server)
            theirs = await bare_client(session, server, job, prompts_of(shards, job.group))
            if ours.tokens != theirs.tokens:
                raise SystemExit(f"slime generated {ours.tokens} tokens, and the bare client {theirs.tokens}")
            found += [(ours, theirs)] if number else []
            print(f"{ours.rate:.1f} and {theirs.rate:.1f} tokens/s", file=sys.stderr)
    await sampler.close()
    return found


def fixed_lengths(file: Path, count: int) -> Iterator[str]:
    """Return the first ``count`` rows of a prompt file; their responses ignore the end of sequence."""
    with file.open(encoding="utf-8") as rows:
        for _, line in zip(range(count), rows, strict=False):
            row = json.loads(line)
            metadata = row.get("metadata", {}) | {"sampling_params": {"ignore_eos": True}}
            yield json.dumps(row | {"metadata": metadata}) + "\n"


async def sampled(sampler: TrainSampler, number: int) -> tuple[Side, Sequence[TrainBatch]]:
    """Generate one rollout with the sampler, until its shards can be sent."""
    sampler.published(number)
    before, clock = cpu_seconds(), time.perf_counter()
    rollout = await sampler.sample(number)
    for shard in rollout.shards:
        pickle.dumps(shard, protocol=5)  # as Ray does
    clock = time.perf_counter() - clock
    tokens = int(rollout.metrics["rollout/response_tokens"])
    return Side(tokens, clock, used(before)), rollout.shards


def prompts_of(shards: Sequence[TrainBatch], group: int) -> list[list[int]]:
    """Return the token ids of a rollout's prompts, one entry per group."""
    found: Counter[tuple[int, ...]] = Counter()
    for shard in shards:
        ends = shard.lengths_B.cumsum()
        for end, length, response in zip(ends, shard.lengths_B, shard.response_lengths_B, strict=True):
            found[tuple(map(int, shard.tokens_T[end - length : end - response]))] += 1
    return [list(ids) for ids, count in found.items() for _ in range(count // group)]


async def bare_client(session: aiohttp.ClientSession, url: str, job: Job, prompts: Sequence[list[int]]) -> Side:
    """Generate the same rollout without slime."""
    sampling = {"n": job.group, "max_new_tokens": job.tokens, "temperature": 1.0, "ignore_eos": True}
    room = asyncio.Semaphore(IN_FLIGHT // job.group)

    async def one(ids: list[int]) -> int:
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        async with room, session.post(f"{url}/generate", json=body) as response:
            rows: list[dict[str, Any]] = await response.json()
        return sum(len(row["output_ids"]) for row in rows)

    before, clock = cpu_seconds(), time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, prompts)))
    return Side(tokens, time.perf_counter() - clock, used(before))


async def empty_cache(session: aiohttp.ClientSession, url: str) -> None:
    """Empty the prefix cache of the idle server."""
    async with session.post(f"{url}/flush_cache") as response:
        response.raise_for_status()


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds of this process and its reward processes, and those including server and router."""
    own = psutil.Process()
    seconds = {one: sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True))}
    client = [one for one in seconds if one == own or any("reward_worker" in word for word in one.cmdline())]
    return sum(seconds[one] for one in client), sum(seconds.values())


def used(before: tuple[float, float]) -> tuple[float, float]:
    """Return the CPU seconds since ``before``."""
    client, everything = cpu_seconds()
    return client - before[0], everything - before[1]


def print_row(name: str, job: Job, found: Sequence[tuple[Side, Side]]) -> None:
    """Print medians, and the range of the rounds."""
    cells = [name, f"{job.prompts * job.group} x {job.tokens}"]
    for side in zip(*found, strict=True):
        rates = [one.rate for one in side]
        cells.append(f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")
    ratios = [ours.rate / theirs.rate for ours, theirs in found]
    cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    for place in (0, 1):
        cells += [f"{statistics.median(one.cpu[place] for one in side):.2f}" for side in zip(*found, strict=True)]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
