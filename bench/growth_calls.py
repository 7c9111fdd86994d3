"""What a rank costs the driver, and an engine the learner rank that publishes: calls of the core, to processes that do
nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from bench.growth_engines import engines
from slime_core.runtime.actors import Call
from slime_core.runtime.waiting import wait
from slime_core.weights.engine_control import EngineControl

PENDING = (100, 1_000, 4_000)
ENGINES = (8, 64, 256)
LOOKS = 10


class Rank:
    """Works on one call at a time."""

    def work(self, seconds: float) -> dict[str, float]:
        """Sleep."""
        time.sleep(seconds)
        return {"train/loss": 0.5}


def calls_table() -> None:
    """Print both tables: CPU ms of the calling process, and wall seconds."""
    print("| pending calls | CPU ms of one look | CPU ms until all results are read |\n|---|---|---|")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for count in PENDING:
        look, read = _waited(count)
        print(f"| {count:,} | {look:.1f} | {read:.0f} |", flush=True)
    ray.shutdown()
    print("\n| engines | CPU ms a control call | ms of the clock for a call of all engines |\n|---|---|---|")
    for count in ENGINES:
        cpu, clock = _controlled(count)
        print(f"| {count} | {cpu:.2f} | {clock:.0f} |", flush=True)


def _waited(count: int) -> tuple[float, float]:
    """Return the CPU ms of one check of ``count`` pending calls, and of waiting until all end together."""
    rank: Any = ray.remote(num_cpus=0)(Rank).remote()
    ray.get(rank.work.remote(0))
    rank.work.remote(3 + count / 1_000)
    calls: list[Call[object]] = [Call(rank.work.remote(0), f"rank {number}", "train") for number in range(count)]
    started = time.process_time()
    for _ in range(LOOKS):
        ray.wait([call.ref for call in calls], num_returns=1, timeout=0.05, fetch_local=False)
    looked = time.process_time()
    wait(calls, what="training")
    return 1e3 * (looked - started) / LOOKS, 1e3 * (time.process_time() - looked)


def _controlled(count: int) -> tuple[float, float]:
    with engines(count, vocab_size=16) as urls:
        control = EngineControl(urls, timeout_s=60)
        started = time.process_time(), time.monotonic()
        for _ in range(LOOKS):
            control.flush_cache()
        cpu, clock = time.process_time() - started[0], time.monotonic() - started[1]
        control.close()
    return 1e3 * cpu / LOOKS / count, 1e3 * clock / LOOKS
