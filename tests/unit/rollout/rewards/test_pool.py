"""Rewards in worker processes: every failure costs its own sample, with a message."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.config.secrets import PASS_ENV
from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, local_file
from slime_core.plugins.manifest import record
from slime_core.rollout.components import default_num_workers
from slime_core.rollout.reward_pool import RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.types import RewardFailure, Sample
from tests.processes import children, left_of, runs

PLUGIN = '''
import asyncio, math, os, subprocess, sys, threading, time
import numpy
from pathlib import Path
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("mean", Mean)
    add.reward_model("each", Each, scope="group")
    add.reward_model("rendezvous", Rendezvous)
    add.reward_model("threaded", Threaded)

class Mean:
    """Does what the response says."""
    def __init__(self, options, run):
        self.run = run
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
            case "secret": return float(len(os.environ["OPENAI_API_KEY"]))
            case "service": raise OSError("Max retries exceeded with url: /score?code=abc (Caused by X)")
            case "none": return None
            case "numpy": return numpy.float32(0.5)
            case "dict": return {"score": 1, "format": 0.5}
            case "model": return float(len(self.run.models["judge"]))
            case "daemon": return float(subprocess.Popen(["sleep", "601"], start_new_session=True).pid)
            case "print": print("a word from the reward", flush=True)
            case "quit": sys.exit(0)
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

class Rendezvous:
    """Returns once four calls run at the same time."""
    def __init__(self, options, run):
        self.all = asyncio.Barrier(4)
    async def score(self, samples):
        await self.all.wait()
        return [1.0] * len(samples)
'''


def settings(tmp_path: Path, **chosen: Any) -> RewardPoolSettings:
    manifest = record([CORE, local_file(PLUGIN.encode(), path="mean.py")])
    return RewardPoolSettings(manifest.to_json(), log_file=tmp_path / "rewards.log", **{"timeout_s": 60.0, **chosen})


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., RewardPool]]:
    """Makes pools of one worker, unless told otherwise."""
    pools: list[RewardPool] = []

    def make(**chosen: object) -> RewardPool:
        pools.append(RewardPool(settings(tmp_path, **{"num_workers": 1, **chosen})))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()
    assert children("reward_worker") == []


@pytest.fixture
def pool(start: Callable[..., RewardPool]) -> RewardPool:
    return start(memory_gib=0.5)


@pytest.fixture
def hasty(start: Callable[..., RewardPool]) -> RewardPool:
    """For calls that run into the time limit."""
    return start(timeout_s=1.0)


def samples(*responses: str) -> list[Sample]:
    return [Sample(response=response) for response in responses]


async def score(pool: RewardPool, *responses: str, model: str = "mean", together: bool = False) -> list[Any]:
    return await pool.score(model, samples(*responses), together=together)


async def test_a_reward_gets_a_secret_of_the_environment_where_the_user_passes_it_on(
    start: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-12345")
    (failure,) = await score(start(), "secret")
    assert failure.cause == "KeyError"
    monkeypatch.setenv(PASS_ENV, "OPENAI_*")
    assert await score(start(), "secret") == [8.0]


async def test_rewards_come_back_in_order_and_a_model_has_the_models_that_the_run_serves(
    start: Callable[..., RewardPool],
) -> None:
    pool = start(run=RunView(models={"judge": "http://judge"}))
    assert await score(pool, "model", "numpy", "", "dict") == [12.0, 0.5, 0.0, {"score": 1.0, "format": 0.5}]


async def test_memory_of_an_earlier_call_costs_no_sample(pool: RewardPool) -> None:
    await score(pool, "hoard")
    assert await score(pool, "need") == await score(pool, "need") == [1.0]


@pytest.mark.parametrize(
    ("response", "cause", "error"),
    [
        ("exit", "crash", r"reward model 'mean' .*/rewards\.log"),
        ("eat", "memory", r"reward model 'mean' .* GiB \(--reward-memory-gib\)"),
        ("service", "OSError", r"with url: /score\?\*\*\* \(Caused by X\) \(mean.py:\d+, in one\)\. .*/rewards\.log"),
        ("none", "invalid", "reward model 'mean' .* None;"),
        ("circle", "RecursionError", "reward model 'mean'"),
        ("cancelled", "CancelledError", "^reward model 'mean': .*CancelledError$"),
        ("left", "GeneratorExit", "^reward model 'mean': .*GeneratorExit$"),
        ("interrupted", "KeyboardInterrupt", "KeyboardInterrupt$"),
        ("half", "ValueError", r"^reward model 'mean': \\ud83d \(mean.py:\d+, in one\)\."),
        ("deaf", "crash", "ended its process"),
        ("hang", "timeout", r"reward model 'mean' .* 1 s \(--reward-timeout-s\)"),
        ("wait", "timeout", r"reward model 'mean' .* s \(--reward-timeout-s\)"),
        ("child", "timeout", r" 1 s \(--reward-timeout-s\)"),
    ],
)
async def test_a_reward_that_misbehaves_costs_its_own_sample(
    pool: RewardPool, hasty: RewardPool, response: str, cause: str, error: str
) -> None:
    first, bad, last = await score(hasty if cause == "timeout" else pool, "a", response, "bcd")
    assert (first, last) == (1.0, 3.0)
    assert isinstance(bad, RewardFailure)
    assert bad.cause == cause
    assert re.search(error, bad.error)


async def test_another_call_on_the_worker_that_is_ended_keeps_its_rewards(hasty: RewardPool) -> None:
    answers = await asyncio.gather(*(score(hasty, text) for text in ("a", "hang", "bb", "exit", "ccc")))
    assert [answer[0] for answer in answers[::2]] == [1.0, 2.0, 3.0]
    assert [answer[0].cause for answer in answers[1::2]] == ["timeout", "crash"]


async def test_a_model_that_wants_a_group_fails_for_the_whole_group(pool: RewardPool) -> None:
    answers = await score(pool, "a", "half", together=True)
    assert [answer.cause for answer in answers] == ["ValueError", "ValueError"]


@pytest.mark.parametrize(("response", "cause"), [("hang", "timeout"), ("cancelled", "CancelledError")])
async def test_a_model_of_groups_that_scores_each_by_itself_fails_for_one_sample(
    hasty: RewardPool, response: str, cause: str
) -> None:
    first, bad, last = await score(hasty, "a", response, "bcd", model="each", together=True)
    assert (first, bad.cause, last) == (1.0, cause, 3.0)


async def test_calls_that_wait_overlap(pool: RewardPool) -> None:
    calls = (score(pool, "a", model="rendezvous", together=True) for _ in range(4))
    assert await asyncio.gather(*calls) == [[1.0]] * 4


async def test_a_worker_loads_exactly_the_drivers_plugins(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    wrong = chosen.manifest.replace('"version": "0.1.0"', '"version": "9.9.9"', 1)
    pool = RewardPool(RewardPoolSettings(wrong, log_file=chosen.log_file))
    with pytest.raises(PluginError, match=r"slime-rl 9\.9\.9"):
        await score(pool, "a")
    await pool.close()


TOO_MUCH = {
    "quit": ("SystemExit", ": 0"),
    "long": ("invalid", " 'xxxx"),
    "long error": ("ValueError", ": xxxx"),
    "huge": ("OverflowError", "int too large"),
    "nan in a dict": ("invalid", "{'score': 1.0, 'format': nan}"),
}


async def test_oversized_rewards_fail_their_own_sample_with_a_short_message(
    start: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = start()
    lock: Any = threading.Lock()
    locked = Sample(response="x", metadata={"lock": lock})
    first, *failures, last = await score(pool, "true", *TOO_MUCH, "loud")
    unsent, after = await pool.score("mean", [locked, *samples("ab")], together=False)
    await pool.close()
    assert (first, last, after) == (1.0, 4.0, 2.0)
    for failure, (cause, shown) in zip(failures, TOO_MUCH.values(), strict=True):
        assert (failure.cause, len(failure.error) < 2100) == (cause, True)
        assert failure.error.startswith("reward model 'mean'")
        assert shown in failure.error
    assert isinstance(unsent, RewardFailure)
    assert unsent.cause == "invalid"
    assert (tmp_path / "rewards.log").stat().st_size >= 10**8  # the end of the line may follow later


async def test_calls_in_flight_fail_when_the_pool_is_closed_and_start_no_process(pool: RewardPool) -> None:
    calls = [asyncio.create_task(score(pool, "wait")) for _ in range(20)]
    while not children("reward_worker"):
        await asyncio.sleep(0.01)
    await pool.close()
    assert {failure.cause for (failure,) in await asyncio.gather(*calls)} == {"crash"}
    assert children("reward_worker") == []


async def test_five_hundred_calls_at_once_with_one_that_hangs_and_one_that_dies(
    start: Callable[..., RewardPool],
) -> None:
    pool = start(timeout_s=1.0, num_workers=2)
    texts = ["hang" if place == 100 else "exit" if place == 101 else "abc" for place in range(500)]
    answers = [answer for (answer,) in await asyncio.gather(*(score(pool, text) for text in texts))]
    odd = {place: answer.cause for place, answer in enumerate(answers) if isinstance(answer, RewardFailure)}
    assert (odd, answers.count(3.0)) == ({100: "timeout", 101: "crash"}, 498)


async def test_a_thread_that_hangs_blocks_no_other_call(hasty: RewardPool) -> None:
    before = await score(hasty, "a", model="threaded")
    (hung,) = await score(hasty, "hang", model="threaded")
    assert hung.cause == "timeout"
    assert await score(hasty, "a", model="threaded") == before


async def test_calls_that_come_together_spread_over_all_processes_and_others_start_none(
    start: Callable[..., RewardPool],
) -> None:
    pool = start(num_workers=3)
    for _ in range(3):
        await score(pool, "a")
    assert len(children("reward_worker")) == 1
    await asyncio.gather(*(score(pool, "a") for _ in range(6)))
    assert len(children("reward_worker")) == 3


@pytest.mark.parametrize("together", [True, False])
async def test_a_call_that_hangs_alone_in_a_process_is_not_retried(hasty: RewardPool, together: bool) -> None:
    (hung,) = await score(hasty, "hang", together=together)
    assert (hung.cause, hung.own) == ("timeout", True)
    assert children("reward_worker") == []


async def test_samples_of_a_group_are_retried_concurrently(start: Callable[..., RewardPool], tmp_path: Path) -> None:
    """Each waits in its process for the others: one after the other they would not come to an end."""
    waits = [Sample(response="exit once", metadata={"folder": str(tmp_path), "count": 3}) for _ in range(3)]
    assert await start(num_workers=3).score("mean", waits, together=False) == [1.0] * 3


def test_there_are_as_many_processes_as_half_the_cores_within_bounds() -> None:
    assert [default_num_workers(cores) for cores in (1, 2, 8, 192)] == [2, 2, 4, 16]


async def test_output_of_a_reward_is_in_the_log(pool: RewardPool, tmp_path: Path) -> None:
    await score(pool, "print")
    assert (tmp_path / "rewards.log").read_text() == "a word from the reward\n"


async def test_processes_that_a_reward_started_end_with_the_pool(pool: RewardPool) -> None:
    (pid,) = await score(pool, "daemon")
    assert runs(int(pid))
    await pool.close()
    assert left_of(int(pid)) == []


async def test_a_process_that_is_killed_while_it_does_nothing_is_replaced_and_leaves_nothing(pool: RewardPool) -> None:
    """By SIGKILL, which Ray sends to children of an actor that ends."""
    (pid,) = await score(pool, "daemon")
    for child in children("reward_worker"):
        child.kill()
    assert await score(pool, "abc") == [3.0]
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
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SAMPLER], stdin=pipe, stdout=pipe, text=True) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        sampler.stdin.write(settings(tmp_path).manifest)
        sampler.stdin.close()
        pid = int(sampler.stdout.readline())
        sampler.kill()
    assert left_of(pid) == []
