"""Tokens per second of conversations against single turns with equally many tokens, and what the prefix cache saves.

    python -m bench.multi_turn outputs/multi-turn

One real engine on this machine with the built-in model. Every response has ``TURNS * PER_TURN`` sampled tokens: in one
turn, or in turns between which 4 tokens are added, which the engine reads in addition. Each turn of a conversation
sends all its ids again; without the prefix cache the engine would read them all again.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slime_core.config.schema import ARITHMETIC
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import Sample
from slime_testing.harness.engines import connect, real_engine

CONVERSATIONS = 64
TURNS = 4
PER_TURN = 16
ADDED = [15, 6, 15, 7]
ROUNDS = 3


class _Ids:
    """An encoder without text: a prompt is the number of its conversation."""

    uses_template = False

    def encode(self, prompt: str, **_: object) -> list[int]:
        return [3, *(5 + int(one) for one in prompt.zfill(4)), 4]

    def decode(self, ids: Sequence[int]) -> str:
        return ""


async def conversation(context: GenerateContext, number: int, turns: int) -> int:
    """Generate one conversation; return the number of sampled tokens."""
    sampling = SamplingParams(max_new_tokens=TURNS * PER_TURN // turns, extra={"ignore_eos": True})
    trajectory = context.start(Sample(prompt=str(number), index=number))
    for turn in range(turns):
        if turn:
            trajectory.append_ids(ADDED, [0] * len(ADDED))
        await trajectory.generate(sampling)
    return sum(trajectory.finish().loss_mask or [1] * TURNS * PER_TURN)


async def measured(url: str, turns: int, first: int) -> float:
    """Return the sampled tokens per second of ``CONVERSATIONS`` concurrent conversations."""
    async with connect(url) as client:
        context = GenerateContext(client, cast(Any, _Ids()), context_length=128)
        started = time.perf_counter()
        numbers = range(first, first + CONVERSATIONS)
        counts = await asyncio.gather(*(conversation(context, number, turns) for number in numbers))
        return sum(counts) / (time.perf_counter() - started)


def cached(log: str) -> tuple[int, int]:
    """Return the number of prompt tokens that the engine read, and of those in its cache."""
    found = re.findall(r"#new-token: (\d+), #cached-token: (\d+)", log)
    return sum(int(new) for new, _ in found), sum(int(old) for _, old in found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    print("| turns | tokens/s | to one turn | prompt tokens read | in the cache |\n|---|---|---|---|---|")
    with real_engine(ARITHMETIC / "model", logs=folder, dtype="float32") as url:
        asyncio.run(measured(url, 1, 9000))  # warm
        speeds: dict[int, list[float]] = {1: [], TURNS: []}
        tokens: dict[int, tuple[int, int]] = {1: (0, 0), TURNS: (0, 0)}
        for count in range(ROUNDS):
            for turns in speeds:
                before = cached((folder / "engine.log").read_text())
                speeds[turns].append(asyncio.run(measured(url, turns, (2 * count + (turns > 1)) * CONVERSATIONS)))
                time.sleep(0.5)  # the log is written after the answers
                after = cached((folder / "engine.log").read_text())
                have = tokens[turns]
                tokens[turns] = (have[0] + after[0] - before[0], have[1] + after[1] - before[1])
        single = sorted(speeds[1])[ROUNDS // 2]
        for turns, found in speeds.items():
            speed = sorted(found)[ROUNDS // 2]
            new, old = tokens[turns]
            print(f"| {turns} | {speed:.0f} | {speed / single:.2f} | {new} | {old} ({old / (new + old):.0%}) |")


if __name__ == "__main__":
    main()
