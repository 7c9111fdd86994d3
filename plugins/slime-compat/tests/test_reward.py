"""Rewards as slime's users write them."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from slime_compat.calling import THREADS
from slime_compat.reward import PathReward
from slime_compat.rollout import reach
from slime_core import RunView, SamplerInfo
from slime_core.errors import PluginError
from slime_core.rollout.reward_pool import RewardFailure, RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.types import Sample
from tests.function_paths import resolve
from tests.http_service import HttpService

SAMPLES = [
    Sample(index=0, prompt="1+1", response="2", label="2"),
    Sample(index=1, prompt="2+2", response="5", label="4"),
]


async def test_an_async_function_scores_each_sample(write) -> None:
    options = write(
        "custom_rm_path",
        """
        import asyncio

        async def reward_func(args, sample, **kwargs):
            await asyncio.sleep(0.02 if sample.index == 0 else 0)
            return float(sample.response == sample.label) * args.scale
        """,
    )
    options.arguments.scale = 3
    assert await PathReward(options, RunView()).score(SAMPLES) == [3.0, 0.0]


async def test_a_plain_function_runs_outside_the_event_loop(write) -> None:
    text = "import threading\ndef f(args, sample): return {'thread': threading.get_ident(), 'score': 1}\n"
    (reward,) = await PathReward(write("custom_rm_path", text), RunView()).score(SAMPLES[:1])
    assert isinstance(reward, dict)
    assert (reward["score"], reward["thread"] == threading.get_ident()) == (1.0, False)


@pytest.mark.parametrize("second", ["sample", "samples"])
async def test_with_group_rm_the_function_gets_the_list(write, second: str) -> None:
    text = f"async def f(args, {second}, **kwargs): return [len({second}) + one.index for one in {second}]"
    options = write("custom_rm_path", text, "--group-rm")
    assert await PathReward(options, RunView()).score(SAMPLES) == [2.0, 3.0]


ONE = "async def reward_func(args, sample, **kwargs): return float(sample.response == sample.label)"
LIST = "async def reward_func(args, batch, **kwargs): return [0.0 for one in batch] + [0.0] * len(batch[1:])"
EITHER = """
    async def reward_func(args, sample, **kwargs):
        if isinstance(sample, list):
            return [one.reward for one in sample]
        return sample.index
    """


def test_a_function_of_one_sample_is_refused_with_group_rm_before_it_runs(write) -> None:
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", ONE, "--group-rm")
    assert "mine.py: with --group-rm, reward_func" in str(refused.value)


def test_a_function_of_a_list_is_refused_without_group_rm_before_it_runs(write) -> None:
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", LIST, name=":reward_func")
    assert "mine.py:reward_func: reward_func" in str(refused.value)


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


async def test_a_function_over_samples_gets_all_that_are_scored_together(write) -> None:
    options = write(
        "custom_rm_path", "async def batched_custom_rm(args, samples): return [len(samples)] * len(samples)"
    )
    assert await PathReward(options, RunView()).score(SAMPLES) == [2.0, 2.0]


async def test_without_samples_no_service_is_called(write) -> None:
    options = write("custom_rm_path", "def f(args, samples): raise AssertionError")
    assert await PathReward(options, RunView()).score([]) == []


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
    reward = PathReward(write("custom_rm_path", text, "--rm-model-path", "/m"), RunView())
    assert await reward.score(SAMPLES) == [106.0, 106.0]
    assert await reward.score(SAMPLES[:1]) == [106.0]


async def test_a_class_gets_labels_where_it_asks_for_them(write) -> None:
    text = """
        class Exact:
            def compute_reward(self, prompts, responses, labels):
                return [float(r == l) for r, l in zip(responses, labels)]
        """
    assert await PathReward(write("custom_rm_path", text), RunView()).score(SAMPLES) == [1.0, 0.0]


async def test_numbers_of_numpy_are_numbers_and_texts_are_left_out(write) -> None:
    text = "import numpy as np\ndef f(args, sample): return {'score': np.float32(0.5), 'pred': 'four', 'acc': True}"
    (reward,) = await PathReward(write("custom_rm_path", text), RunView()).score(SAMPLES[:1])
    assert reward == {"score": 0.5, "acc": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(args, sample): return None", "it returned None for sample 0"),
        ("def f(args, sample): return '1'", "it returned '1' for sample 0"),
        ("def f(args, samples): return 1.0", "it returned 1.0 for 2 samples"),
        ("def f(args, samples): return [1.0]", "it returned 1 rewards for 2"),
        ("def f(args, sample): return 1 / 0", "failed with ZeroDivisionError"),
    ],
)
async def test_a_malformed_reward_is_refused_with_the_name_of_the_flag(write, text: str, message: str) -> None:
    with pytest.raises(PluginError) as refused:
        await PathReward(write("custom_rm_path", text), RunView()).score(SAMPLES)
    assert str(refused.value).startswith("--custom-rm-path mine.py: ")
    assert message in str(refused.value)


BAD_ONE = """
    def reward(args, sample):
        if sample.index == 1:
            raise ValueError("a bad one")
        return 1.0
"""


async def test_a_failure_costs_its_own_sample(write) -> None:
    first, second = await PathReward(write("custom_rm_path", BAD_ONE), RunView()).score(SAMPLES)
    assert first == 1.0
    assert "mine.py:4, in reward" in second


@pytest.mark.parametrize("value", ["None", "'1'", "next(iter([]))"])
async def test_a_malformed_reward_costs_its_own_sample(write, value: str) -> None:
    text = f"def f(args, sample): return 2.0 if sample.index else {value}"
    first, second = await PathReward(write("custom_rm_path", text), RunView()).score(SAMPLES)
    assert (str(first).startswith("--custom-rm-path mine.py: "), second) == (True, 2.0)


async def test_a_function_of_one_sample_that_ends_its_process_costs_that_sample(write) -> None:
    text = """
        import os

        async def reward(args, sample):
            if sample.index == 1:
                os._exit(3)
            return 1.0 if sample.index < 3 else None
        """
    options = write("custom_rm_path", text)
    manifest = resolve(["--custom-rm-path", "mine.py"])[1].manifest
    pool = RewardPool(RewardPoolSettings(manifest.to_json(), {"compat": options}, num_workers=1, timeout_s=300.0))
    try:
        more = [Sample(index=2), Sample(index=3)]
        first, failure, last, none = await pool.score("custom_rm_path", [*SAMPLES, *more], together=True)
    finally:
        await pool.close()
    assert (first, last) == (1.0, 1.0)
    assert isinstance(failure, RewardFailure)
    assert isinstance(none, RewardFailure)
    assert (failure.cause, none.cause) == ("crash", "invalid")


async def test_calls_that_hang_keep_no_thread_from_later_ones(write) -> None:
    text = """
        def reward(args, sample):
            if sample.index:
                args.end.wait(240)
            return 1.0
        """
    options = write("custom_rm_path", text)
    options.arguments.end = threading.Event()
    reward = PathReward(options, RunView())
    hanging = [Sample(index=1)] * (THREADS + 1)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await reward.score(hanging)
        async with asyncio.timeout(120):
            assert await reward.score([Sample(index=0)]) == [1.0]
    finally:
        options.arguments.end.set()


def test_a_class_that_cannot_be_made_is_refused(write) -> None:
    text = "class C:\n    def __init__(self): raise OSError('no such model')\n    def compute_reward(self, p, r): ..."
    with pytest.raises(PluginError, match="failed with OSError"):
        PathReward(write("custom_rm_path", text), RunView())


async def test_a_function_of_a_file_scores_in_a_process_of_its_own(write) -> None:
    text = """
        import os
        from slime_compat import get_model_url, post

        async def reward(args, sample):
            if sample.index == 9:
                raise KeyError("no such label")
            url = get_model_url(args, "judge", "/score")
            return {"process": os.getpid(), "router": args.sglang_router_port, "judge": await post(url, {"n": 1})}
        """
    options = write("custom_rm_path", text)
    manifest = resolve(["--custom-rm-path", "mine.py"])[1].manifest
    pool = RewardPool(RewardPoolSettings(manifest.to_json(), {"compat": options}, num_workers=1))
    with HttpService(lambda body: 7) as judge:
        # The sampler passes the addresses of the auxiliary models like this.
        reach(options, SamplerInfo("http://127.0.0.1:3", {"judge": judge.url}))
        try:
            (reward, _) = await pool.score("custom_rm_path", SAMPLES, together=True)
            (failure,) = await pool.score("custom_rm_path", [Sample(index=9)], together=True)
        finally:
            await pool.close()
    assert judge.requests == [("/score", {"n": 1})] * 2
    assert isinstance(reward, dict)
    assert (reward["process"] != os.getpid(), reward["router"], reward["judge"]) == (True, 3.0, 7.0)
    assert isinstance(failure, RewardFailure)
    assert "--custom-rm-path mine.py" in failure.error
