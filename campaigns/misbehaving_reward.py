"""A plugin with a reward model that compares responses with labels, and misbehaves for five of every 64 samples."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from slime_core import Registration, Sample, hookimpl

WAYS = {3: "hangs", 14: "crashes", 25: "eats memory", 36: "returns NaN", 47: "raises ValueError"}
"""Number of the sample within its rollout of 64 -> what its reward does."""

CAUSES = {
    "hangs": "timeout",
    "crashes": "crash",
    "eats memory": "memory",
    "returns NaN": "invalid",
    "raises ValueError": "ValueError",
}
"""What it does -> the cause under which the run counts it."""

CHUNK = 32 * 2**20


@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("misbehaving", score)


async def score(samples: Sequence[Sample]) -> list[float]:
    """Return 1.0 for each response that equals its label, else 0.0; five of every 64 samples misbehave instead."""
    return [_reward(sample) for sample in samples]


def _reward(sample: Sample) -> float:
    match WAYS.get((sample.index or 0) % 64):
        case "hangs":
            time.sleep(10**6)
        case "crashes":
            os._exit(3)
        case "eats memory":
            eaten = []
            while True:
                eaten.append(b"x" * CHUNK)
        case "returns NaN":
            return math.nan
        case "raises ValueError":
            raise ValueError(f"no answer in {sample.response!r}")
    return float(sample.response.strip() == sample.label)
