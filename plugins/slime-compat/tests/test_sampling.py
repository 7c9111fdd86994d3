"""Whole rollouts with functions by path: the real sampler, against an engine that listens."""

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from slime_compat.rollout import generated
from slime_core import Sample
from slime_core.cli.run import options_of
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import PluginError, RunError
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler
from slime_testing.fake_engine import FakeEngine
from tests.function_paths import resolve

Build = Callable[..., TrainSampler]


@pytest.fixture
async def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> AsyncIterator[Build]:
    """``build(text, *flags)``: a sampler of two prompts a rollout, two samples each, with functions of ``mine.py``."""
    monkeypatch.chdir(tmp_path)
    samplers: list[TrainSampler] = []
    data = Path("train.jsonl").absolute()
    data.write_text("\n".join(json.dumps({"prompt": f"{n}+1", "label": str(n + 1)}) for n in range(4)))

    def make(text: str, *flags: str) -> TrainSampler:
        Path("mine.py").write_text(textwrap.dedent(text))
        words = ["--plugin", "grpo", "--rollout-batch-size", "2", "--rollout-max-response-len", "8", *flags]
        if "--n-samples-per-prompt" not in flags:
            words += ["--n-samples-per-prompt", "2"]
        if "--custom-rm-path" not in flags:
            words += ["--rm-type", "random"]
        resolved, active = resolve([*words, "--rollout-shuffle", "false"])
        options = options_of(resolved, active)
        settings = SamplerSettings(resolved.config, ARITHMETIC / "model", data, engine.url, options=options)
        samplers.append(TrainSampler(settings, active.registry))
        return samplers[-1]

    yield make
    for sampler in samplers:
        await sampler.close()


REWARD = "async def reward(args, sample, **kwargs):\n    return float(sample.index)\n"


async def test_a_reward_by_path_trains_and_other_processes_find_the_router(build: Build, engine: FakeEngine) -> None:
    sampler = build(REWARD, "--custom-rm-path", "mine.py")
    sampled = await sampler.sample(0)
    assert sampled.metrics["rollout/raw_reward"] == 1.5
    assert sampled.shards[0].columns_B["advantages"].tolist() == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-3)
    args = pickle.loads(pickle.dumps(sampler._settings.options["compat"])).arguments
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == engine.url


async def test_hooks_see_each_sample_before_it_is_rewarded_in_order(build: Build) -> None:
    text = """
        import copy

        def first(args, sample, *, rollout_id=None, evaluation=False):
            sample.metadata["seen"] = [rollout_id, evaluation, sample.reward]

        async def second(args, sample):
            sample.metadata["seen"].append(len(sample.tokens))
            return copy.deepcopy(sample)

        def reward(args, sample):
            assert sample.metadata["seen"] == [7, False, None, 10], sample.metadata
            return 1.0
        """
    hooks = ("--rollout-sample-hook-path", "mine.py:first", "--rollout-sample-hook-path", "mine.py:second")
    sampled = await build(text, *hooks, "--custom-rm-path", "mine.py:reward").sample(7)
    assert sampled.metrics["rollout/raw_reward"] == 1.0


async def test_hooks_that_return_no_sample_leave_the_replacement_to_other_plugins(write, context) -> None:
    options = write("rollout_sample_hook_path", "def hook(args, sample): sample.metadata['seen'] = True")
    sample = Sample(prompt="1+1")
    assert await generated(options, sample, context) is None
    assert sample.metadata == {"seen": True}


async def test_groups_that_a_filter_drops_are_replaced_and_removed_samples_do_not_train(build: Build) -> None:
    text = REWARD + (
        "from types import SimpleNamespace as Output\n"
        "def keep(args, samples): return Output(keep=samples[0].group_index != 0, reason='first one')\n"
        "def remove(args, groups): groups[-1][0].remove_sample = True\n"
    )
    filters = ("--dynamic-sampling-filter-path", "mine.py:keep", "--rollout-sample-filter-path", "mine.py:remove")
    sampled = await build(text, "--custom-rm-path", "mine.py:reward", *filters).sample(0)
    (shard,) = sampled.shards
    assert shard.indices_B.tolist() == [2, 3, 4, 5]
    assert shard.loss_mask_U.tolist() == [1] * 10 + [0] * 5 + [1] * 5
    assert (sampled.metrics["rollout/dropped/first_one"], sampled.metrics["rollout/changed/filtered"]) == (1, 1)


EIGHT = """
    def reward(args, sample):
        return float(sample.index != 7)

    def shape(args, samples):
        raw = [sample.get_reward_value(args) for sample in samples]
        return raw, [one - 0.5 for one in raw]
    """


@pytest.mark.parametrize(
    ("flags", "advantages"),
    [
        # Groups (1, 1, 1, 1) and (1, 1, 1, 0): r - 1/2; normalised again the second would be (.5, .5, .5, -1.5).
        (("--custom-reward-post-process-path", "mine.py:shape"), [0.5] * 7 + [-0.5]),
        (("--disable-rewards-normalization",), [1.0] * 7 + [0.0]),
    ],
)
async def test_shaped_and_raw_rewards_are_advantages_and_the_raw_ones_are_logged(
    build: Build, flags: tuple[str, ...], advantages: list[float]
) -> None:
    sampler = build(EIGHT, "--custom-rm-path", "mine.py:reward", *flags, "--n-samples-per-prompt", "4")
    sampled = await sampler.sample(0)
    assert sampled.shards[0].columns_B["advantages"].tolist() == advantages
    assert sampled.metrics["rollout/raw_reward"] == 7 / 8


CONVERT = """
def convert(args, samples):
    samples = samples[1:]
    data = {
        "tokens": [list(one.tokens) for one in samples],
        "response_lengths": [one.response_length for one in samples],
        "rewards": [0.25 * one.index for one in samples],
        "raw_reward": [one.reward for one in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [one.index for one in samples],
        "loss_masks": [[1] * (one.response_length - 1) + [0] for one in samples],
        "rollout_ids": [one.index for one in samples],
    }
    return data
"""
BY_COLUMNS = ("--custom-convert-samples-to-train-data-path", "mine.py")


async def test_columns_of_a_function_are_what_is_trained(build: Build) -> None:
    (shard,) = (await build(CONVERT, *BY_COLUMNS).sample(0)).shards
    assert shard.indices_B.tolist() == [1, 2, 3]
    assert shard.columns_B["advantages"].tolist() == [0.25, 0.5, 0.75]
    assert shard.loss_mask_U.tolist() == [1, 1, 1, 1, 0] * 3
    assert shard.rollout_log_probs_U.tolist() == [-0.5] * 15


async def test_too_few_rows_for_the_ranks_and_steps_are_refused(build: Build) -> None:
    text = CONVERT.replace("samples[1:]", "samples[:1]")
    with pytest.raises(RunError, match="1 rows"):
        await build(text, *BY_COLUMNS, "--num-steps-per-rollout", "2").sample(0)


ROLLOUT_FLAG = "--rollout-function-path"
MALFORMED = [
    ("--rollout-sample-hook-path", "def f(args, sample): return 3", "returned 3"),
    *(
        ("--custom-reward-post-process-path", f"def f(args, samples): return {returned}", "4 ")
        for returned in ("[1.0, 2.0]", "([1.0], [1.0])", "([1.0] * 4, [float('nan')] * 4)", "None")
    ),
    *(
        (ROLLOUT_FLAG, f"def f(args, rollout_id, data_source): return {returned}", r"slime_core\.Sample")
        for returned in ("None", "[]", "[['1+1']]", "{}")
    ),
    (
        ROLLOUT_FLAG,
        "from slime_core import Sample\ndef f(args, rollout_id, data_source): return [[Sample()]]",
        "group_index",
    ),
]


@pytest.mark.parametrize(("flag", "text", "named"), MALFORMED)
async def test_a_malformed_result_is_refused(build: Build, flag: str, text: str, named: str) -> None:
    with pytest.raises(PluginError, match=rf"{flag} mine\.py: .*{named}"):
        await build(text, flag, "mine.py").sample(0)


LOG = """
    def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        rollout_extra_metrics["mine/samples"] = len(samples) + 100 * rollout_id + (rollout_time > 0)
        return args.replaces

    def log_eval(rollout_id, args, data, extra_metrics):
        columns = data["sums"]
        assert columns["rewards"] == [one.reward for one in columns["samples"]]
        extra_metrics["mine/truncated"] = sum(columns["truncated"]) + rollout_id
        return args.replaces
"""


@pytest.mark.parametrize("replaces", [True, False])
async def test_log_functions_add_to_the_metrics_or_replace_them(build: Build, replaces: bool) -> None:
    Path("mine.yaml").write_text(f"replaces: {str(replaces).lower()}\n")
    flags = ("--custom-rollout-log-function-path", "mine.py:log", "--custom-config-path", "mine.yaml")
    more = ("--custom-eval-rollout-log-function-path", "mine.py:log_eval", "--eval-prompt-data", "sums", "train.jsonl")
    sampler = build(LOG, *flags, *more)
    metrics, scores = (await sampler.sample(2)).metrics, await sampler.evaluate(3)
    assert (metrics.get("mine/samples"), scores.get("mine/truncated")) == ((None, None) if replaces else (205, 3))
    assert ("rollout/raw_reward" in metrics, "eval/sums" in scores) == (not replaces, not replaces)


async def test_a_function_sees_every_group_and_the_data_source(build: Build) -> None:
    text = """
        def look(args, all_groups, data_source):
            args.seen = ([len(group) for group in all_groups], len(data_source))
            data_source.add_samples(all_groups[:1])
        """
    sampler = build(text, "--rollout-all-samples-process-path", "mine.py")
    await sampler.sample(0)
    assert sampler._settings.options["compat"].arguments.seen == ([2, 2], 4)
    assert (await sampler.sample(1)).shards[0].indices_B.tolist() == [0, 1, 4, 5]


ROLLOUT = """
from dataclasses import dataclass, field

from slime_core import Sample

@dataclass
class RolloutFnTrainOutput:
    samples: list
    metrics: dict = field(default_factory=dict)

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        sample.tokens = [6, 15, 6]
        sample.append_response_tokens(tokens=[7, 1], log_probs=[-0.25, -0.5], text="2")
        sample.status = Sample.Status.COMPLETED
        sample.reward = sample.index + 10 * rollout_id if sample.index else None
    return RolloutFnTrainOutput(samples=groups, metrics={"mine/answer": 2})
"""


async def test_a_rollout_function_replaces_the_sampler(build: Build, engine: FakeEngine) -> None:
    flags = (ROLLOUT_FLAG, "mine.py:generate_rollout", "--custom-rm-path", "mine.py:reward")
    sampler = build(ROLLOUT + REWARD, *flags)
    sampled = await sampler.sample(1)
    assert engine.calls == []
    assert sampled.metrics["mine/answer"] == 2
    # The sample without a reward is scored by the run's reward model.
    assert sampled.metrics["rollout/raw_reward"] == (0 + 11 + 12 + 13) / 4
    assert sampled.shards[0].rollout_log_probs_U.tolist() == [-0.25, -0.5] * 4
    assert sampler.cursor()["source"]["next"] == 2


async def test_a_rollout_function_may_be_async_and_return_a_bare_list_with_fan_outs(build: Build) -> None:
    text = ROLLOUT.replace("def generate_rollout", "async def generate_rollout")
    text = text[: text.index("    return Rollout")] + "    return [[group] for group in groups]\n"
    sampled = await build(text, ROLLOUT_FLAG, "mine.py:generate_rollout").sample(1)
    assert sampled.shards[0].indices_B.tolist() == [0, 1, 2, 3]


# --- Evaluations ------------------------------------------------------------------------------------------------------

EVALUATION_FLAG = "--eval-function-path"
NAMED_REWARDS = "{'a': {'rewards': [{'acc': 1.0, 'score': 0.25}]}}"


@pytest.mark.parametrize(
    ("returned", "flags", "scores"),
    [
        (
            "{'a': {'rewards': [1.0, 0.0], 'truncated': [True, False]}, 'b': {'rewards': [rollout_id]}}",
            (),
            {"eval/a": 0.5, "eval/a-truncated_ratio": 0.5, "eval/b": 5.0},
        ),
        (
            "{'a': {'rewards': [np.float32(0.5), {'acc': np.array(1.0), 'other': None}]}}",
            ("--reward-key", "acc"),
            {"eval/a": 0.75},
        ),
        (NAMED_REWARDS, ("--reward-key", "score"), {"eval/a": 0.25}),
        (NAMED_REWARDS, ("--reward-key", "score", "--eval-reward-key", "acc"), {"eval/a": 1.0}),
    ],
)
async def test_an_evaluation_function_replaces_the_core(
    build: Build, engine: FakeEngine, returned: str, flags: tuple[str, ...], scores: dict[str, float]
) -> None:
    text = f"""
        import numpy as np

        def measure(args, rollout_id, data_source, evaluation=False):
            assert evaluation and len(data_source) == 4
            return {returned}
        """
    assert await build(text, EVALUATION_FLAG, "mine.py", *flags).evaluate(5) == scores
    assert engine.calls == []


@pytest.mark.parametrize(
    ("returned", "flags", "named"),
    [
        ("{'a': [1.0]}", (), '"rewards": list'),
        ("{'a': {'rewards': [1.0, {'acc': 1.0}]}}", (), "{'acc': 1.0} at place 1; .* None"),
        ("{'a': {'rewards': [{'acc': 1.0}]}}", ("--reward-key", "score"), "{'acc': 1.0} at place 0; .* 'score'"),
        ("{'a': {'rewards': [None]}}", (), "None at place 0"),
        ("{'a': {'rewards': ['1']}}", (), "'1' at place 0"),
    ],
)
async def test_an_evaluation_with_rewards_that_are_no_numbers_is_refused(
    build: Build, returned: str, flags: tuple[str, ...], named: str
) -> None:
    sampler = build(f"def f(args, rollout_id, data_source): return {returned}", EVALUATION_FLAG, "mine.py", *flags)
    with pytest.raises(PluginError, match=rf"{EVALUATION_FLAG} mine\.py: .*{named}"):
        await sampler.evaluate(0)
