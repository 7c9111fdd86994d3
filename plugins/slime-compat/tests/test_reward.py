"""Rewards as slime's users write them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from slime_compat.calling import THREADS
from slime_compat.reward import PathReward
from slime_compat.rollout import start
from slime_core.errors import PluginError
from slime_core.provisional import SamplerInfo
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.types import Sample
from tests.function_paths import resolve
from tests.http_service import HttpService

SAMPLES = [
    Sample(index=0, prompt="1+1", response="2", label="2"),
    Sample(index=1, prompt="2+2", response="5", label="4"),
]

FORMS = {
    "async, of one sample": (
        "import asyncio\nasync def f(args, sample, **kwargs):\n"
        "    await asyncio.sleep(0.02 if sample.index == 0 else 0)\n    return float(sample.response == sample.label)",
        [1.0, 0.0],
    ),
    "of a list": ("async def f(args, samples): return [len(samples)] * len(samples)", [2.0, 2.0]),
    "of a group": ("async def f(args, sample, **kwargs): return [len(sample) + s.index for s in sample]", [2.0, 3.0]),
    "of a group, named samples": ("def f(args, samples): return [len(samples) + s.index for s in samples]", [2.0, 3.0]),
    "a class that takes labels": (
        "class F:\n    def compute_reward(self, prompts, responses, labels):\n"
        "        return [float(r == l) for r, l in zip(responses, labels)]",
        [1.0, 0.0],
    ),
    "numbers of numpy, and texts": (
        "import numpy as np\ndef f(args, sample): return {'score': np.float32(0.5), 'pred': 'four', 'acc': True}",
        [{"score": 0.5, "acc": 1.0}] * 2,
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_function_of_every_form_scores_each_sample(write, form: str) -> None:
    text, expected = FORMS[form]
    options = write("custom_rm_path", text, *(["--group-rm"] if "group" in form else []))
    assert await PathReward(options).score(SAMPLES) == expected


async def test_a_plain_function_runs_outside_the_event_loop(write) -> None:
    text = "import threading\ndef f(args, sample): return threading.get_ident()\n"
    (thread,) = await PathReward(write("custom_rm_path", text)).score(SAMPLES[:1])
    assert thread != threading.get_ident()


async def test_without_samples_no_service_is_called(write) -> None:
    options = write("custom_rm_path", "def f(args, samples): raise AssertionError")
    assert await PathReward(options).score([]) == []


async def test_a_class_is_made_once_with_the_folder_of_its_model(write) -> None:
    text = """
        import numpy as np

        class LengthModel:
            made = 0

            def __init__(self, model_path):
                type(self).made += 1
                self.model_path = model_path

            def compute_reward(self, prompts, responses):
                rewards = [len(p) + len(r) + len(self.model_path) + 100 * self.made for p, r in zip(prompts, responses)]
                return np.array(rewards, np.float32)
        """
    reward = PathReward(write("custom_rm_path", text, "--rm-model-path", "/m"))
    assert await reward.score(SAMPLES) == [106.0, 106.0]
    assert await reward.score(SAMPLES[:1]) == [106.0]


def test_a_class_that_cannot_be_made_is_refused(write) -> None:
    text = "class C:\n    def __init__(self): raise OSError('no such model')\n    def compute_reward(self, p, r): ..."
    with pytest.raises(PluginError, match="OSError"):
        PathReward(write("custom_rm_path", text))


ONE = "async def f(args, sample, **kwargs): return float(sample.response == sample.label)"
LIST = "async def f(args, batch, **kwargs): return [0.0 for one in batch] + [0.0] * len(batch[1:])"
EITHER = "def f(args, sample): return [s.reward for s in sample] if isinstance(sample, list) else sample.index"


@pytest.mark.parametrize(("text", "flags"), [(ONE, ["--group-rm"]), (LIST, [])])
def test_a_function_that_uses_its_parameter_otherwise_is_refused_before_it_runs(write, text, flags) -> None:
    with pytest.raises(PluginError, match=r"--custom-rm-path mine\.py: .*--group-rm"):
        write("custom_rm_path", text, *flags)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (ONE, []),
        (LIST, ["--group-rm"]),
        (EITHER, []),
        (EITHER, ["--group-rm"]),
        ("from math import fsum as score\ndef f(args, sample): return score(sample)", ["--group-rm"]),
        ("def f(args, sample): return [sample.index(one) for one in sample]", ["--group-rm"]),
    ],
)
def test_functions_that_can_be_called_so_are_accepted(write, text: str, flags: list[str]) -> None:
    write("custom_rm_path", text, *flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(args, sample): return None", "None"),
        ("def f(args, sample): return '1'", "'1'"),
        ("def f(args, samples): return 1.0", "1.0"),
        ("def f(args, samples): return [1.0]", r"\[1.0\]"),
        ("def f(args, sample): return 1 / 0", "ZeroDivisionError"),
    ],
)
async def test_a_malformed_reward_is_refused_with_the_name_of_the_flag(write, text: str, message: str) -> None:
    with pytest.raises(PluginError, match=rf"^--custom-rm-path mine\.py: .*{message}"):
        await PathReward(write("custom_rm_path", text)).score(SAMPLES)


@pytest.mark.parametrize(
    ("value", "named"),
    [("None", "None"), ("'1'", "'1'"), ("next(iter([]))", "mine.py:2, in f"), ("1 / 0", "mine.py:2, in f")],
)
async def test_a_failure_costs_its_own_sample(write, value: str, named: str) -> None:
    text = f"def f(args, sample):\n    return 2.0 if sample.index else {value}"
    failure, reward = await PathReward(write("custom_rm_path", text)).score(SAMPLES)
    assert reward == 2.0
    assert str(failure).startswith("--custom-rm-path mine.py: ")
    assert named in str(failure)


async def test_calls_that_hang_keep_no_thread_from_later_ones(write) -> None:
    text = """
        def reward(args, sample):
            if sample.index:
                args.end.wait(240)
            return 1.0
        """
    options = write("custom_rm_path", text)
    options.arguments.end = threading.Event()
    reward = PathReward(options)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await reward.score([Sample(index=1)] * (THREADS + 1))
        async with asyncio.timeout(120):
            assert await reward.score([Sample(index=0)]) == [1.0]
    finally:
        options.arguments.end.set()


# --- In reward workers ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def workers(write, text: str, url: str = "http://127.0.0.1:3") -> AsyncIterator[RewardPool]:
    """A pool of one worker, with the addresses that the sampler sets."""
    options = write("custom_rm_path", text)
    start(options, SamplerInfo("http://127.0.0.1:3", {"judge": url}))
    manifest = resolve(["--custom-rm-path", "mine.py"])[1].manifest
    pool = RewardPool(RewardPoolSettings(manifest.to_json(), {"compat": options}, num_workers=1, timeout_s=300.0))
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_function_of_one_sample_that_ends_its_process_costs_that_sample(write) -> None:
    text = """
        import os

        async def reward(args, sample):
            if sample.index == 1:
                os._exit(3)
            return 1.0 if sample.index < 3 else None
        """
    async with workers(write, text) as pool:
        samples = [*SAMPLES, Sample(index=2), Sample(index=3)]
        first, crashed, last, invalid = await pool.score("custom_rm_path", samples, together=True)
    assert (first, last) == (1.0, 1.0)
    assert isinstance(crashed, RewardFailure)
    assert isinstance(invalid, RewardFailure)
    assert (crashed.cause, invalid.cause) == ("crash", "invalid")


async def test_a_function_of_a_file_scores_in_another_process_and_finds_other_models(write) -> None:
    text = """
        import os
        from slime_compat import get_model_url, post

        async def reward(args, sample):
            if sample.index == 9:
                raise KeyError("no such label")
            url = get_model_url(args, "judge", "/score")
            return {"process": os.getpid(), "router": args.sglang_router_port, "judge": await post(url, {"n": 1})}
        """
    with HttpService(lambda body: 7) as judge:
        async with workers(write, text, judge.url) as pool:
            (reward, _) = await pool.score("custom_rm_path", SAMPLES, together=True)
            (failure,) = await pool.score("custom_rm_path", [Sample(index=9)], together=True)
    assert judge.requests == [("/score", {"n": 1})] * 2
    assert isinstance(reward, dict)
    assert (reward["process"] != os.getpid(), reward["router"], reward["judge"]) == (True, 3.0, 7.0)
    assert isinstance(failure, RewardFailure)
    assert "--custom-rm-path mine.py" in failure.error
