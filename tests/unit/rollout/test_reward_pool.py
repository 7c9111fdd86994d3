"""Rewards in real processes of their own: every way to misbehave costs its own sample, and says so."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, PluginSource, local_file
from slime_core.plugins.manifest import record
from slime_core.rollout.reward_pool import RewardFailure, RewardPool, RewardPoolSettings
from slime_core.types import Sample

PLUGIN = '''
import asyncio, math, os, time
from slime_core import Component, RewardTraits, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("mean", target=f"{__name__}:Mean")
    yield Component("meeting", target=f"{__name__}:Meeting")

class Mean:
    """Does what the response says."""
    def __init__(self, options=None):
        self.options = options
    async def score(self, samples):
        return [await self.one(sample) for sample in samples]
    async def one(self, sample):
        match sample.response:
            case "hang": time.sleep(600)
            case "wait": await asyncio.sleep(600)
            case "exit": os._exit(3)
            case "child": os.system("sleep 600")
            case "eat":
                eaten = []
                while True:
                    eaten.append(bytes(8 * 2**20))
            case "raise": raise ValueError("no such answer")
            case "nan": return math.nan
            case "text": return "good"
            case "dict": return {"score": 1, "format": 0.5}
        return float(len(sample.response))

class Meeting:
    """Returns once four calls are there at one time."""
    def __init__(self, options=None):
        self.all = asyncio.Barrier(4)
    async def score(self, samples):
        await self.all.wait()
        return [1.0] * len(samples)
'''


def settings(tmp_path: Path, **chosen: object) -> RewardPoolSettings:
    manifest = record([PluginSource(CORE), local_file(PLUGIN.encode(), path="mean.py")])
    return RewardPoolSettings(manifest.to_json(), log_file=tmp_path / "rewards.log", **{"timeout_s": 0.5, **chosen})


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[RewardPool]:
    pool = RewardPool(settings(tmp_path, memory_gib=0.5, num_workers=1))
    yield pool
    await pool.close()
    assert [child for child in psutil.Process().children() if "reward_worker" in " ".join(child.cmdline())] == []


def samples(*responses: str) -> list[Sample]:
    return [Sample(response=response) for response in responses]


async def test_rewards_come_back_in_order_and_named_ones_as_numbers(pool: RewardPool) -> None:
    found = await pool.score("mean", samples("abc", "", "dict"), together=False)
    assert found == [3.0, 0.0, {"score": 1.0, "format": 0.5}]


@pytest.mark.parametrize(
    ("response", "cause", "error"),
    [
        ("hang", "timeout", r"reward model 'mean' took more than 0\.5 s \(--reward-timeout-s\) and was ended"),
        ("wait", "timeout", "reward model 'mean': .*TimeoutError"),
        ("child", "timeout", r"took more than 0\.5 s \(--reward-timeout-s\)"),
        ("exit", "crash", "reward model 'mean' ended its process; what it printed is in"),
        ("eat", "memory", "memory|MemoryError"),
        ("raise", "ValueError", "reward model 'mean': no such answer"),
        ("nan", "invalid", "reward model 'mean' returned nan; accepted is a finite number, or a dict"),
        ("text", "invalid", "reward model 'mean' returned 'good'; accepted is a finite number"),
    ],
)
async def test_a_reward_that_misbehaves_costs_its_own_sample(
    pool: RewardPool, response: str, cause: str, error: str
) -> None:
    first, bad, last = await pool.score("mean", samples("a", response, "bcd"), together=False)
    assert (first, last) == (1.0, 3.0)
    assert isinstance(bad, RewardFailure)
    assert bad.cause == cause
    assert re.search(error, bad.error)


async def test_another_call_on_the_worker_that_is_ended_keeps_its_rewards(pool: RewardPool) -> None:
    calls = [pool.score("mean", samples(text), together=False) for text in ("a", "hang", "bb", "exit", "ccc")]
    found = [answer[0] for answer in await asyncio.gather(*calls)]
    assert [found[0], found[2], found[4]] == [1.0, 2.0, 3.0]
    assert [found[1].cause, found[3].cause] == ["timeout", "crash"]


async def test_a_model_that_wants_a_group_fails_for_the_whole_group(pool: RewardPool) -> None:
    found = await pool.score("mean", samples("a", "raise"), together=True)
    assert [answer.cause for answer in found] == ["ValueError", "ValueError"]


async def test_calls_that_wait_overlap(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=60.0))
    found = await asyncio.gather(*(pool.score("meeting", samples("a"), together=True) for _ in range(4)))
    await pool.close()
    assert found == [[1.0]] * 4


async def test_a_worker_loads_exactly_the_drivers_plugins(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    wrong = chosen.manifest.replace('"version": "0.1.0"', '"version": "9.9.9"', 1)
    pool = RewardPool(RewardPoolSettings(wrong, log_file=chosen.log_file))
    with pytest.raises(PluginError, match=r"slime-rl 9\.9\.9 .* version"):
        await pool.score("mean", samples("a"), together=False)
    await pool.close()


async def test_what_a_reward_prints_is_in_the_log_and_its_children_die_with_it(
    pool: RewardPool, tmp_path: Path
) -> None:
    await pool.score("mean", samples("child"), together=False)
    sleeping = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "600"]]
    assert [one for one in sleeping if one.ppid() == os.getpid()] == []
    assert (tmp_path / "rewards.log").exists()
