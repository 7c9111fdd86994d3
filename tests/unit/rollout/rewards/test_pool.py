"""Rewards in worker processes: every failure costs its own sample, with a message."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slime_core import RunView
from slime_core.config.secrets import PASS_ENV
from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, PluginSource, local_file
from slime_core.plugins.manifest import record
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.rollout.sampler_components import default_num_workers
from slime_core.types import Sample
from tests.http_service import HttpService
from tests.processes import children, left_of, runs

PLUGIN = '''
import asyncio, math, os, subprocess, sys, threading, time
import numpy
from pathlib import Path
from slime_core import Component, RewardTraits, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("mean", target=f"{__name__}:Mean")
    yield Component("each", target=f"{__name__}:Each", traits=RewardTraits(scope="group"))
    yield Component("rendezvous", target=f"{__name__}:Rendezvous")
    yield Component("short", target=f"{__name__}:Short")
    yield Component("threaded", target=f"{__name__}:Threaded")
    yield Component("asking", target=f"{__name__}:Asking")

class Mean:
    """Does what the response says."""
    def __init__(self, options, run):
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
            case "hoard": self.hoard = bytes(250 * 2**20)
            case "need": return float(len(bytes(250 * 2**20)) > 0)
            case "raise": raise ValueError("no such answer")
            case "nan": return math.nan
            case "secret": return float(len(os.environ["OPENAI_API_KEY"]))
            case "service": raise OSError("Max retries exceeded with url: /score?code=abc (Caused by X)")
            case "text": return "good"
            case "dict": return {"score": 1, "format": 0.5}
            case "none": return None
            case "numpy": return numpy.float32(0.5)
            case "daemon": return float(subprocess.Popen(["sleep", "601"], start_new_session=True).pid)
            case "print": print("a word from the reward", flush=True)
            case "quit": sys.exit(0)
            case "twice":
                if os.fork():
                    await asyncio.sleep(0.2)
                    return 1.0
                if sample.index:
                    await asyncio.sleep(0.1)
                return 2.0
            case "heavy": return {"x" * 2**25: 1.0}
            case "long": return "x" * 10**7
            case "long error": raise ValueError("x" * 10**7)
            case "loud": print("x" * 10**8)
            case "huge": return 10**400
            case "nan in a dict": return {"score": 1.0, "format": math.nan}
            case "true": return True
            case "cancelled": raise asyncio.CancelledError
            case "left": raise GeneratorExit
            case "interrupted": raise KeyboardInterrupt
            case "half": raise ValueError("\\ud83d")
            case "exit once":
                folder = Path(sample.metadata["folder"])
                if not (folder / "first").exists():
                    (folder / "first").touch()
                    os._exit(3)
                (folder / f"again-{os.getpid()}").touch()
                while len(list(folder.glob("again-*"))) < sample.metadata["count"]:
                    time.sleep(0.01)
                return 1.0
            case "deaf": os.closerange(0, 100)
            case "elsewhere": os.chdir("/")
            case "circle":
                circle = {}
                circle["self"] = circle
                return circle
        return float(len(sample.response))

class Short:
    def __init__(self, options, run):
        pass
    async def score(self, samples):
        return [1.0] * (len(samples) + 1)

class Threaded:
    """Leaves a thread that runs on; returns the number of threads before."""
    def __init__(self, options, run):
        pass
    async def score(self, samples):
        before = float(threading.active_count())
        if samples[0].response == "hang":
            await asyncio.to_thread(time.sleep, 600)
        return [before] * len(samples)

class Each(Mean):
    """Says, once it is made, that it needs no group."""
    scores_each = True

class Asking:
    """Asks the judge that the run serves."""
    def __init__(self, options, run):
        self.models = run.models
    async def score(self, samples):
        return await asyncio.gather(*(asyncio.to_thread(self.one, sample) for sample in samples))
    def one(self, sample):
        import json, urllib.request
        body = json.dumps({"text": sample.response}).encode()
        with urllib.request.urlopen(self.models["judge"] + "/score", body) as answer:
            return json.load(answer)

class Rendezvous:
    """Returns once four calls run at the same time."""
    def __init__(self, options, run):
        self.all = asyncio.Barrier(4)
    async def score(self, samples):
        await self.all.wait()
        return [1.0] * len(samples)
'''


def settings(tmp_path: Path, **chosen: object) -> RewardPoolSettings:
    manifest = record([PluginSource(CORE), local_file(PLUGIN.encode(), path="mean.py")])
    return RewardPoolSettings(manifest.to_json(), log_file=tmp_path / "rewards.log", **{"timeout_s": 60.0, **chosen})


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[RewardPool]:
    pool = RewardPool(settings(tmp_path, memory_gib=0.5, num_workers=1))
    yield pool
    await pool.close()
    assert children("reward_worker") == []


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[RewardPool]:
    """For calls that run into the time limit."""
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=1.0))
    yield pool
    await pool.close()
    assert children("reward_worker") == []


def samples(*responses: str) -> list[Sample]:
    return [Sample(response=response) for response in responses]


async def test_a_reward_gets_a_secret_of_the_environment_where_the_user_passes_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-12345")
    for passed in ("", "OPENAI_*"):
        monkeypatch.setenv(PASS_ENV, passed)
        pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=20.0))
        (found,) = await pool.score("mean", samples("secret"), together=False)
        await pool.close()
        if passed:
            assert found == 8.0
        else:
            assert isinstance(found, RewardFailure)
            assert "SLIME_PASS_ENV=OPENAI_API_KEY" in found.error
            assert "sk-12345" not in found.error


async def test_memory_of_an_earlier_call_costs_no_sample(pool: RewardPool) -> None:
    await pool.score("mean", samples("hoard"), together=False)
    assert await pool.score("mean", samples("need"), together=False) == [1.0]
    assert await pool.score("mean", samples("need"), together=False) == [1.0]


async def test_rewards_come_back_in_order_and_named_ones_as_numbers(pool: RewardPool) -> None:
    found = await pool.score("mean", samples("abc", "", "dict"), together=False)
    assert found == [3.0, 0.0, {"score": 1.0, "format": 0.5}]


@pytest.mark.parametrize(
    ("response", "cause", "error"),
    [
        ("exit", "crash", r"reward model 'mean' .*/rewards\.log"),
        ("eat", "memory", r"reward model 'mean' .* GiB \(--reward-memory-gib\)"),
        ("raise", "ValueError", "reward model 'mean': no such answer"),
        ("service", "OSError", r"with url: /score\?\*\*\* \(Caused by X\) \(mean.py:\d+, in one\)\. .*/rewards\.log"),
        ("nan", "invalid", "reward model 'mean' .* nan;"),
        ("none", "invalid", "reward model 'mean' .* None;"),
        ("circle", "RecursionError", "reward model 'mean'"),
        ("cancelled", "CancelledError", "^reward model 'mean': .*CancelledError$"),
        ("left", "GeneratorExit", "^reward model 'mean': .*GeneratorExit$"),
        ("interrupted", "KeyboardInterrupt", "KeyboardInterrupt$"),
        ("half", "ValueError", r"^reward model 'mean': \\ud83d \(mean.py:\d+, in one\)\."),
        ("deaf", "crash", "ended its process"),
        ("text", "invalid", "reward model 'mean' .* 'good';"),
    ],
)
async def test_a_reward_that_misbehaves_costs_its_own_sample(
    pool: RewardPool, response: str, cause: str, error: str
) -> None:
    await assert_costs_its_own_sample(pool, response, cause, error)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("hang", r"reward model 'mean' .* 1 s \(--reward-timeout-s\)"),
        ("wait", r"reward model 'mean' .* s \(--reward-timeout-s\)"),
        ("child", r" 1 s \(--reward-timeout-s\)"),
    ],
)
async def test_a_reward_that_takes_too_long_costs_its_own_sample(hasty: RewardPool, response: str, error: str) -> None:
    await assert_costs_its_own_sample(hasty, response, "timeout", error)


async def assert_costs_its_own_sample(pool: RewardPool, response: str, cause: str, error: str) -> None:
    first, bad, last = await pool.score("mean", samples("a", response, "bcd"), together=False)
    assert (first, last) == (1.0, 3.0)
    assert isinstance(bad, RewardFailure)
    assert bad.cause == cause
    assert re.search(error, bad.error)


async def test_another_call_on_the_worker_that_is_ended_keeps_its_rewards(hasty: RewardPool) -> None:
    calls = [hasty.score("mean", samples(text), together=False) for text in ("a", "hang", "bb", "exit", "ccc")]
    found = [answer[0] for answer in await asyncio.gather(*calls)]
    assert [found[0], found[2], found[4]] == [1.0, 2.0, 3.0]
    assert [found[1].cause, found[3].cause] == ["timeout", "crash"]


async def test_a_model_that_wants_a_group_fails_for_the_whole_group(pool: RewardPool) -> None:
    found = await pool.score("mean", samples("a", "raise"), together=True)
    assert [answer.cause for answer in found] == ["ValueError", "ValueError"]


@pytest.mark.parametrize(("response", "cause"), [("hang", "timeout"), ("cancelled", "CancelledError")])
async def test_a_model_of_groups_that_scores_each_by_itself_fails_for_one_sample(
    hasty: RewardPool, response: str, cause: str
) -> None:
    first, bad, last = await hasty.score("each", samples("a", response, "bcd"), together=True)
    assert (first, last) == (1.0, 3.0)
    assert isinstance(bad, RewardFailure)
    assert bad.cause == cause


async def test_calls_that_wait_overlap(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=60.0))
    found = await asyncio.gather(*(pool.score("rendezvous", samples("a"), together=True) for _ in range(4)))
    await pool.close()
    assert found == [[1.0]] * 4


async def test_a_worker_loads_exactly_the_drivers_plugins(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    wrong = chosen.manifest.replace('"version": "0.1.0"', '"version": "9.9.9"', 1)
    pool = RewardPool(RewardPoolSettings(wrong, log_file=chosen.log_file))
    with pytest.raises(PluginError, match=r"slime-rl 9\.9\.9 .* version"):
        await pool.score("mean", samples("a"), together=False)
    await pool.close()


async def test_numbers_of_numpy_are_numbers(pool: RewardPool) -> None:
    assert await pool.score("mean", samples("numpy"), together=False) == [0.5]


async def test_a_reward_in_a_process_asks_the_models_that_the_run_serves(tmp_path: Path) -> None:
    with HttpService(lambda body: len(body["text"])) as judge:
        pool = RewardPool(settings(tmp_path, timeout_s=60.0, run=RunView(models={"judge": judge.url})))
        try:
            assert await pool.score("asking", samples("a", "bb"), together=False) == [1.0, 2.0]
        finally:
            await pool.close()
    assert sorted(judge.requests, key=str) == [("/score", {"text": "a"}), ("/score", {"text": "bb"})]


async def test_a_process_forked_by_a_reward_answers_no_call(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=60.0))
    twice = [Sample(response="twice", index=index) for index in range(2)]
    try:
        assert await pool.score("mean", twice, together=False) == [1.0, 1.0]
        assert await pool.score("mean", samples("abc"), together=False) == [3.0]
    finally:
        await pool.close()


TOO_MUCH = {
    "quit": ("SystemExit", ": 0"),
    "heavy": ("ValueError", " 16777216 bytes"),
    "long": ("invalid", " 'xxxx"),
    "long error": ("ValueError", ": xxxx"),
    "huge": ("OverflowError", "int too large"),
    "nan in a dict": ("invalid", "{'score': 1.0, 'format': nan}"),
}


async def test_oversized_rewards_fail_their_own_sample_with_a_short_message(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, timeout_s=60.0, num_workers=1))
    locked = Sample(response="x", metadata={"lock": threading.Lock()})
    try:
        first, *failures, last = await pool.score("mean", samples("true", *TOO_MUCH, "loud"), together=False)
        unsent, after = await pool.score("mean", [locked, *samples("ab")], together=False)
    finally:
        await pool.close()
    assert (first, last, after) == (1.0, 4.0, 2.0)
    for failure, (cause, shown) in zip(failures, TOO_MUCH.values(), strict=True):
        assert (failure.cause, len(failure.error) < 2100) == (cause, True)
        assert failure.error.startswith("reward model 'mean'")
        assert shown in failure.error
    assert unsent.cause == "invalid"
    assert "'_thread.lock'" in unsent.error
    assert (tmp_path / "rewards.log").stat().st_size >= 10**8  # the end of the line may follow later


async def test_calls_in_flight_fail_when_the_pool_is_closed_and_start_no_process(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=60.0))
    calls = [asyncio.create_task(pool.score("mean", samples("wait"), together=False)) for _ in range(20)]
    while not pool._slots[0]._process or not pool._slots[0]._process._busy_since():
        await asyncio.sleep(0.01)
    await pool.close()
    assert {one.cause for (one,) in await asyncio.gather(*calls)} == {"crash"}
    assert children("reward_worker") == []


async def test_five_hundred_calls_at_once_with_one_that_hangs_and_one_that_dies(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, timeout_s=1.0))
    try:
        groups = [samples("hang" if place == 100 else "exit" if place == 101 else "abc") for place in range(500)]
        found = await asyncio.gather(*(pool.score("mean", one, together=False) for one in groups))
    finally:
        await pool.close()
    odd = {place: one[0].cause for place, one in enumerate(found) if isinstance(one[0], RewardFailure)}
    assert odd == {100: "timeout", 101: "crash"}
    assert sum(one == [3.0] for one in found) == 498


async def test_too_many_rewards_cost_their_own_call(pool: RewardPool) -> None:
    (found,) = await pool.score("short", samples("a"), together=False)
    assert found == RewardFailure("invalid", "reward model 'short' returned 2 rewards for 1 samples")


async def test_a_thread_that_hangs_blocks_no_other_call(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=1.0))
    (before,) = await pool.score("threaded", samples("a"), together=False)
    (hung,) = await pool.score("threaded", samples("hang"), together=False)
    (after,) = await pool.score("threaded", samples("a"), together=False)
    await pool.close()
    assert hung.cause == "timeout"
    assert after == before


async def test_calls_that_come_together_spread_over_all_processes_and_others_start_none(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=3, timeout_s=60.0))
    for _ in range(3):
        await pool.score("mean", samples("a"), together=False)
    assert [slot._process is not None for slot in pool._slots] == [True, False, False]
    await asyncio.gather(*(pool.score("mean", samples("a"), together=False) for _ in range(6)))
    await pool.close()
    assert [slot._process is not None for slot in pool._slots] == [True, True, True]


async def test_no_call_waits_for_one_that_hangs(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=2, timeout_s=600.0))
    hanging = asyncio.create_task(pool.score("mean", samples("hang"), together=False))
    found = await asyncio.gather(*(pool.score("mean", samples("ab"), together=False) for _ in range(50)))
    assert found == [[2.0]] * 50
    assert not hanging.done()
    await pool.close()
    assert [one.cause for one in await hanging] == ["crash"]


@pytest.mark.parametrize("together", [True, False])
async def test_a_call_that_hangs_alone_in_a_process_is_not_retried(tmp_path: Path, together: bool) -> None:
    pool = RewardPool(settings(tmp_path, num_workers=1, timeout_s=1.0))
    found = await pool.score("mean", samples("hang"), together=together)
    await pool.close()
    assert [one.cause for one in found] == ["timeout"]
    assert pool._isolated_slots[0]._process is None


async def test_samples_of_a_group_are_retried_concurrently(tmp_path: Path) -> None:
    """Each waits in its process for the others: one after the other they would not come to an end."""
    pool = RewardPool(settings(tmp_path, num_workers=3, timeout_s=60.0))
    waits = [Sample(response="exit once", metadata={"folder": str(tmp_path), "count": 3}) for _ in range(3)]
    found = await pool.score("mean", waits, together=False)
    await pool.close()
    assert found == [1.0] * 3


def test_there_are_as_many_processes_as_half_the_cores_within_bounds() -> None:
    assert [default_num_workers(cores) for cores in (1, 2, 8, 192)] == [2, 2, 4, 16]


async def test_output_of_a_reward_is_in_the_log(pool: RewardPool, tmp_path: Path) -> None:
    await pool.score("mean", samples("print"), together=False)
    assert (tmp_path / "rewards.log").read_text() == "a word from the reward\n"


async def test_processes_that_a_reward_started_end_with_the_pool(tmp_path: Path) -> None:
    pool = RewardPool(settings(tmp_path))
    (pid,) = await pool.score("mean", samples("daemon"), together=False)
    assert runs(int(pid))
    await pool.close()
    assert left_of(int(pid)) == []


async def test_a_process_that_is_killed_while_it_does_nothing_is_replaced_and_leaves_nothing(pool: RewardPool) -> None:
    """By SIGKILL, which Ray sends to children of an actor that ends."""
    (pid,) = await pool.score("mean", samples("daemon"), together=False)
    for child in children("reward_worker"):
        child.kill()
    assert await pool.score("mean", samples("abc"), together=False) == [3.0]
    assert left_of(int(pid)) == []


SAMPLER = """
import asyncio, sys
from slime_core.rollout.reward_pool import RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.types import Sample

async def main():
    pool = RewardPool(RewardPoolSettings(sys.stdin.read()))
    print(int((await pool.score("mean", [Sample(response="daemon")], together=False))[0]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_reward_process_is_left_when_the_sampler_is_killed(tmp_path: Path) -> None:
    sampler = subprocess.Popen(
        [sys.executable, "-c", SAMPLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sampler.stdin is not None
    assert sampler.stdout is not None
    sampler.stdin.write(settings(tmp_path).manifest)
    sampler.stdin.close()
    pid = int(sampler.stdout.readline())
    sampler.kill()
    sampler.wait()
    sampler.stdout.close()
    assert left_of(pid) == []
