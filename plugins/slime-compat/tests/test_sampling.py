"""Whole rollouts with functions by path: the real sampler, against an engine that listens."""

from __future__ import annotations

import json
import pickle
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from slime_core.cli.run import options_of
from slime_core.errors import PluginError, RunError
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_testing.fake_engine import FakeEngine
from tests.function_paths import resolve

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"

Build = Callable[..., Sampler]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
async def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> AsyncIterator[Build]:
    """A sampler of two prompts a rollout, two samples each, in a run that names functions of ``mine.py``."""
    monkeypatch.chdir(tmp_path)
    made: list[Sampler] = []
    rows = [{"prompt": f"{n}+1", "label": str(n + 1)} for n in range(4)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(text: str, *flags: str) -> Sampler:
        Path("mine.py").write_text(textwrap.dedent(text))
        shape: tuple[str, ...] = ("--rollout-batch-size", "2", "--rollout-max-response-len", "8")
        if "--n-samples-per-prompt" not in flags:
            shape += ("--n-samples-per-prompt", "2")
        argv = ("--plugin", "grpo", *shape, "--rollout-shuffle", "false", "--rm-type", "random", *flags)
        if "--custom-rm-path" in flags:
            argv = tuple(word for word in argv if word not in ("--rm-type", "random"))
        resolved, active = resolve(argv)
        settings = SamplerSettings(
            resolved.config, FOLDER, Path("train.jsonl").absolute(), engine.url, options=options_of(resolved, active)
        )
        made.append(Sampler(settings, active.registry))
        return made[-1]

    yield make
    for sampler in made:
        await sampler.close()


REWARD = "async def reward(args, sample, **kwargs):\n    return float(sample.index)\n"


async def test_a_reward_by_path_trains(build) -> None:
    sampled = await build(REWARD, "--custom-rm-path", "mine.py").sample(0)
    assert sampled.metrics["rollout/raw_reward"] == 1.5
    assert sampled.shards[0].columns_B["advantages"].tolist() == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-3)


async def test_functions_in_other_processes_find_the_router_too(build, engine) -> None:
    options = build(REWARD, "--custom-rm-path", "mine.py")._settings.options["compat"]
    args = pickle.loads(pickle.dumps(options)).arguments
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == engine.url


async def test_hooks_see_each_sample_before_it_is_rewarded_in_order(build) -> None:
    text = """
        def first(args, sample, *, rollout_id=None, evaluation=False):
            sample.metadata["seen"] = [rollout_id, evaluation, sample.reward]

        async def second(args, sample):
            sample.metadata["seen"].append(len(sample.tokens))
            return sample

        def reward(args, sample):
            assert sample.metadata["seen"] == [7, False, None, 10], sample.metadata
            return 1.0
        """
    paths = ("mine.py:first", "--rollout-sample-hook-path", "mine.py:second")
    sampler = build(text, "--rollout-sample-hook-path", *paths, "--custom-rm-path", "mine.py:reward")
    assert (await sampler.sample(7)).metrics["rollout/raw_reward"] == 1.0


async def test_a_hook_that_returns_something_else_is_refused(build) -> None:
    sampler = build("def hook(args, sample): return 3", "--rollout-sample-hook-path", "mine.py")
    message = "--rollout-sample-hook-path mine.py: it returned 3; accepted: a slime_core.Sample, or None."
    with pytest.raises(PluginError, match=message):
        await sampler.sample(0)


async def test_groups_that_a_filter_drops_are_replaced_and_removed_samples_do_not_train(build, engine) -> None:
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


async def test_shaped_rewards_are_advantages_and_the_plain_ones_are_logged(build) -> None:
    text = REWARD + (
        "def shape(args, samples):\n"
        "    raw = [sample.get_reward_value(args) for sample in samples]\n"
        "    return raw, [one - 3 for one in raw]\n"
    )
    paths = ("--custom-rm-path", "mine.py:reward", "--custom-reward-post-process-path", "mine.py:shape")
    sampled = await build(text, *paths).sample(0)
    assert sampled.shards[0].columns_B["advantages"].tolist() == [-3, -2, -1, 0]
    assert sampled.metrics["rollout/raw_reward"] == 1.5


EIGHT = """
    def reward(args, sample):
        return float(sample.index != 7)

    def shape(args, samples):
        raw = [sample.get_reward_value(args) for sample in samples]
        return raw, [one - 0.5 for one in raw]
    """


async def test_rewards_of_a_function_are_not_normalised_again(build) -> None:
    # Groups (1, 1, 1, 1) and (1, 1, 1, 0): r - 1/2, by hand; normalised again the second would be (.5, .5, .5, -1.5).
    flags = ("--custom-rm-path", "mine.py:reward", "--custom-reward-post-process-path", "mine.py:shape")
    sampled = await build(EIGHT, *flags, "--n-samples-per-prompt", "4").sample(0)
    assert sampled.shards[0].columns_B["advantages"].tolist() == [0.5] * 7 + [-0.5]


async def test_rewards_are_advantages_where_normalisation_is_disabled(build) -> None:
    sizes = ("--n-samples-per-prompt", "4")
    flags = ("--custom-rm-path", "mine.py:reward", "--disable-rewards-normalization")
    sampled = await build(EIGHT, *flags, *sizes).sample(0)
    assert sampled.shards[0].columns_B["advantages"].tolist() == [1.0] * 7 + [0.0]


@pytest.mark.parametrize("returned", ["[1.0, 2.0]", "([1.0], [1.0])", "([1.0] * 4, [float('nan')] * 4)", "None"])
async def test_a_malformed_pair_of_rewards_is_refused(build, returned: str) -> None:
    sampler = build(f"def shape(args, samples): return {returned}", "--custom-reward-post-process-path", "mine.py")
    with pytest.raises(PluginError, match="for 4 samples"):
        await sampler.sample(0)


CONVERT = """
    def convert(args, samples):
        samples = samples[1:]
        return {
            "tokens": [list(one.tokens) for one in samples],
            "response_lengths": [one.response_length for one in samples],
            "rewards": [0.25 * one.index for one in samples],
            "raw_reward": [one.reward for one in samples],
            "truncated": [0 for _ in samples],
            "sample_indices": [one.index for one in samples],
            "loss_masks": [[1] * (one.response_length - 1) + [0] for one in samples],
            "rollout_ids": [one.index for one in samples],
        }
"""


async def test_columns_of_a_function_are_what_is_trained(build) -> None:
    flags = ("--custom-convert-samples-to-train-data-path", "mine.py")
    (shard,) = (await build(CONVERT, *flags).sample(0)).shards
    assert shard.indices_B.tolist() == [1, 2, 3]
    assert shard.columns_B["advantages"].tolist() == [0.25, 0.5, 0.75]
    assert shard.loss_mask_U.tolist() == [1, 1, 1, 1, 0] * 3
    assert shard.rollout_log_probs_U.tolist() == [-0.5] * 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.pop('loss_masks')", "dict without loss_masks"),
        ("data['rewards'].pop()", "'rewards': 3"),
        ("data['sample_indices'][0] = 9", "4 rows, and sample_indices"),
        ("data['loss_masks'][2] = [1]", "1 entries of loss_masks"),
        ("data['rewards'][0] = None", "rewards [None, 0.25, 0.5, 0.75]"),
    ],
)
async def test_columns_that_do_not_fit_together_are_refused(build, change: str, message: str) -> None:
    text = textwrap.dedent(CONVERT).replace("samples[1:]", "samples").replace("return {", "data = {")
    flags = ("--custom-convert-samples-to-train-data-path", "mine.py")
    with pytest.raises(PluginError) as refused:
        await build(f"{text}    {change}\n    return data\n", *flags).sample(0)
    assert str(refused.value).startswith(f"{flags[0]} mine.py: ")
    assert message in str(refused.value)


async def test_too_few_rows_for_the_ranks_and_steps_are_refused_in_words(build) -> None:
    text = textwrap.dedent(CONVERT).replace("samples[1:]", "samples[:1]")
    flags = ("--custom-convert-samples-to-train-data-path", "mine.py")
    message = "mine.py: it returned 1 rows"
    with pytest.raises(RunError, match=message):
        await build(text, *flags, "--num-steps-per-rollout", "2").sample(0)


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
async def test_log_functions_add_to_the_metrics_or_replace_them(build, tmp_path, replaces: bool) -> None:
    (tmp_path / "mine.yaml").write_text(f"replaces: {str(replaces).lower()}\n")
    flags = ("--custom-rollout-log-function-path", "mine.py:log", "--custom-config-path", "mine.yaml")
    more = ("--custom-eval-rollout-log-function-path", "mine.py:log_eval", "--eval-prompt-data", "sums", "train.jsonl")
    sampler = build(LOG, *flags, *more)
    metrics = (await sampler.sample(2)).metrics
    scores = await sampler.evaluate(3)
    assert (metrics.get("mine/samples"), scores.get("mine/truncated")) == ((None, None) if replaces else (205, 3))
    assert ("rollout/raw_reward" in metrics, "eval/sums" in scores) == (not replaces, not replaces)


async def test_a_function_sees_every_group_and_the_data_source(build) -> None:
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


async def test_a_rollout_function_stands_in_for_the_sampler(build, engine) -> None:
    text = textwrap.dedent(ROLLOUT) + "\n" + REWARD
    flags = ("--rollout-function-path", "mine.py:generate_rollout", "--custom-rm-path", "mine.py:reward")
    sampler = build(text, *flags)
    sampled = await sampler.sample(1)
    assert engine.calls == []
    assert sampled.metrics["mine/answer"] == 2
    # The sample without a reward is scored by the run's reward model.
    assert sampled.metrics["rollout/raw_reward"] == (0 + 11 + 12 + 13) / 4
    assert sampled.shards[0].rollout_log_probs_U.tolist() == [-0.25, -0.5] * 4
    assert sampler.cursor()["source"]["next"] == 2


async def test_a_rollout_function_may_be_async_and_return_a_bare_list_with_fan_outs(build) -> None:
    text = textwrap.dedent(ROLLOUT).replace("def generate_rollout", "async def generate_rollout")
    text = text[: text.index("    return Rollout")] + "    return [[group] for group in groups]\n"
    sampled = await build(text, "--rollout-function-path", "mine.py:generate_rollout").sample(1)
    assert sampled.shards[0].indices_B.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("returned", ["None", "[]", "[['1+1']]", "{}"])
async def test_a_malformed_rollout_is_refused(build, returned: str) -> None:
    sampler = build(f"def f(args, rollout_id, data_source): return {returned}", "--rollout-function-path", "mine.py")
    with pytest.raises(PluginError, match=r"slime_core\.Sample"):
        await sampler.sample(0)


async def test_samples_of_no_group_are_refused(build) -> None:
    text = "from slime_core import Sample\ndef f(args, rollout_id, data_source): return [[Sample()]]"
    with pytest.raises(PluginError, match="group_index"):
        await build(text, "--rollout-function-path", "mine.py").sample(0)


async def test_an_evaluation_function_stands_in_for_the_core(build, engine) -> None:
    text = """
        def measure(args, rollout_id, data_source, evaluation=False):
            assert evaluation and len(data_source) == 4
            return {"mine": {"rewards": [1.0, 0.0], "truncated": [True, False]}, "other": {"rewards": [rollout_id]}}
        """
    sampler = build(text, "--eval-function-path", "mine.py")
    assert await sampler.evaluate(5) == {"eval/mine": 0.5, "eval/mine-truncated_ratio": 0.5, "eval/other": 5.0}
    assert engine.calls == []


async def test_a_malformed_evaluation_is_refused(build) -> None:
    sampler = build("def f(args, rollout_id, data_source): return {'a': [1.0]}", "--eval-function-path", "mine.py")
    with pytest.raises(PluginError, match=r'\{name: \{"rewards": list, \.\.\.\}\}'):
        await sampler.evaluate(0)


@pytest.mark.parametrize(
    ("rewards", "flags", "message"),
    [
        ("[1.0, {'acc': 1.0}]", (), "{'acc': 1.0} at place 1; accepted: numbers, or dicts .* which is None"),
        ("[{'acc': 1.0}]", ("--reward-key", "score"), "{'acc': 1.0} at place 0; .* --reward-key, which is 'score'"),
        ("[None]", (), "None at place 0"),
        ("['1']", (), "'1' at place 0"),
    ],
)
async def test_an_evaluation_with_rewards_that_are_no_numbers_is_refused(build, rewards, flags, message) -> None:
    text = f"def f(args, rollout_id, data_source): return {{'a': {{'rewards': {rewards}}}}}"
    sampler = build(text, "--eval-function-path", "mine.py", *flags)
    with pytest.raises(PluginError, match=rf"--eval-function-path mine\.py: rewards of 'a' has {message}"):
        await sampler.evaluate(0)


async def test_an_evaluation_takes_numbers_of_numpy_and_named_rewards(build) -> None:
    text = "import numpy as np\ndef f(args, rollout_id, data_source): return {'a': {'rewards': %s}}"
    rewards = "[np.float32(0.5), {'acc': np.array(1.0), 'other': None}]"
    sampler = build(text % rewards, "--eval-function-path", "mine.py", "--reward-key", "acc")
    assert await sampler.evaluate(0) == {"eval/a": 0.75}


async def test_the_reward_key_of_evaluations_holds_for_a_function_that_evaluates(build) -> None:
    text = "def f(args, rollout_id, data_source): return {'a': {'rewards': [{'acc': 1.0, 'score': 0.25}]}}"
    keys = ("--reward-key", "score", "--eval-reward-key", "acc")
    assert (await build(text, "--eval-function-path", "mine.py", *keys).evaluate(0))["eval/a"] == 1.0
    assert (await build(text, "--eval-function-path", "mine.py", *keys[:2]).evaluate(0))["eval/a"] == 0.25
