"""How evenly the router spreads requests whose prompts share a prefix, and what that costs in prefixes read again.

    python -m bench.router_balance

Real router, four fake engines. 64 requests in flight at once stand for the first wave of a rollout; a second wave sends
the next turn of each of these conversations. The table has, for each share of a prompt that all prompts have in common,
the requests of each engine in the first wave, the load of the busiest engine over the mean of both waves, and the share
of second turns that reached the engine that has their conversation.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slime_core.generation import SamplingParams
from slime_core.generation.context import run_all
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import Router, RouterClient, RouterSettings, Worker
from slime_testing.fake_engine import FakeEngine

ENGINES, REQUESTS, LENGTH = 4, 64, 256
SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
RESPONSE_S = 1.0
"""Duration of a response: longer than sending the wave takes."""
SECOND_TURN = 32


async def wave(url: str, prompts: list[list[int]]) -> None:
    """Send all prompts at once, and wait for the responses."""
    async with GenerateClient(url, timeout_s=120, vocab_size=50_000) as client:
        await run_all(client.generate(ids, sampling=SamplingParams(max_new_tokens=4)) for ids in prompts)


def prompts_of(engine: FakeEngine) -> list[tuple[int, ...]]:
    """Return the prompts that the engine received, in order."""
    bodies: list[Any] = engine.bodies
    return [tuple(body["input_ids"]) for body in bodies]


def measure(share: float, *, seed: int) -> tuple[list[int], float, float]:
    """Return requests per engine in the first wave, the largest imbalance, and the share of turns that stayed."""
    ids = random.Random(seed)
    common = [ids.randrange(10, 49_000) for _ in range(int(LENGTH * share))]
    prompts = [[*common, *(ids.randrange(10, 49_000) for _ in range(LENGTH - len(common)))] for _ in range(REQUESTS)]
    longer = [[*prompt, *(ids.randrange(10, 49_000) for _ in range(SECOND_TURN))] for prompt in prompts]
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(vocab_size=50_000, context_length=4096)) for _ in range(ENGINES)]
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        router = stack.enter_context(Router(RouterSettings(logs / "router.log")))
        router.wait_ready()
        client = RouterClient(router.url)
        client.add([Worker(engine.url) for engine in engines])
        client.wait_registered([engine.url for engine in engines])
        for engine in engines:
            engine.delay_s = RESPONSE_S
        asyncio.run(wave(router.url, prompts))
        first = [len(engine.bodies) for engine in engines]
        at = {ids: number for number, engine in enumerate(engines) for ids in prompts_of(engine)}
        asyncio.run(wave(router.url, longer))
        second = [prompts_of(engine)[count:] for engine, count in zip(engines, first, strict=True)]
    stayed = Counter(at[ids[:LENGTH]] == number for number, prompts in enumerate(second) for ids in prompts)
    worst = max(*first, *map(len, second)) / (REQUESTS / ENGINES)
    return first, worst, stayed[True] / REQUESTS


def main() -> None:
    """Print the table."""
    print("| share in common | first wave | busiest engine to mean | second turns at their engine |\n|---|---|---|---|")
    for share in SHARES:
        first, worst, stayed = measure(share, seed=7)
        print(f"| {share:.0%} | {first} | {worst:.2f} | {stayed:.0%} |")


if __name__ == "__main__":
    main()
