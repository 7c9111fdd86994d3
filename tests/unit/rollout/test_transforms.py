"""Sample transforms in the sampler: groups are kept, replaced, counted and written; errors end the run."""

from __future__ import annotations

import json
import sys

import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig, eval_sets
from slime_core.errors import PluginError, RunError
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import sampler_components
from slime_core.rollout.components import refuse_unusable
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.types import Sample
from tests.unit.rollout.test_sampler import FOLDER, FakeClient, answer

PLUGIN = '''
from slime_core import Component, TransformTraits, Transformed, hookimpl

calls = []
spoiled = []


class Log:
    """Notes which groups it was handed, and their rewards."""

    def __init__(self, options, run):
        pass

    def __call__(self, samples):
        calls.append(("log", samples[0].group_index, [sample.reward for sample in samples]))
        return Transformed(samples)


class Halve:
    """Halves every reward, in place, of all groups at once."""

    def __init__(self, options, run):
        pass

    def __call__(self, groups):
        calls.append(("halve", [group[0].group_index for group in groups]))
        for group in groups:
            for sample in group:
                sample.reward /= 2
        return [Transformed(group, changed={"halved": len(group)}) for group in groups]


class DropFirst(Halve):
    """Drops the first group of the rollout, and halves the rest."""

    def __call__(self, groups):
        found = super().__call__(groups)
        return [Transformed(found[0].samples, dropped="first"), *found[1:]]


class First(Log):
    """Keeps the first sample of a group."""

    def __call__(self, samples):
        return Transformed(samples[:1])


class Pop(Log):
    """Takes the last sample out of the list that it is handed."""

    def __call__(self, samples):
        samples.pop()
        return Transformed(samples)


class Bad(Log):
    def __call__(self, samples):
        return BAD(samples)


@hookimpl
def slime_before_rollout(rollout, groups):
    calls.append(("before", rollout, [group[0].group_index for group in groups]))


@hookimpl
def slime_after_rollout(rollout, samples):
    calls.append(("after", rollout, [sample.index for sample in samples]))
    for reward in spoiled:
        samples[0].reward = reward


@hookimpl
def slime_register_sample_transforms():
    group, rollout = TransformTraits(scope="group"), TransformTraits(scope="rollout")
    yield Component("log", target=f"{__name__}:Log", traits=group)
    yield Component("halve", target=f"{__name__}:Halve", traits=rollout)
    yield Component("drop_first", target=f"{__name__}:DropFirst", traits=rollout)
    yield Component("first", target=f"{__name__}:First", traits=group)
    yield Component("pop", target=f"{__name__}:Pop", traits=group)
    yield Component("bad", target=f"{__name__}:Bad", traits=group)
    yield Component("bad_rollout", target=f"{__name__}:Bad", traits=rollout)
'''

MIXED = [answer("2"), answer("3")]
SAME = [answer("2"), answer("2")]
PROMPTS = ["1+1", "1+2", "1+3", "1+4", "1+5", "1+6"]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=False)


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "toy.py").write_text(PLUGIN)
    yield str(tmp_path / "toy.py")
    for name in [name for name in sys.modules if name.startswith("slime_local_")]:
        del sys.modules[name]


@pytest.fixture
def build(tmp_path, plugin, encoder, monkeypatch):
    """A sampler of 2 groups of 2 samples over six prompts whose right answer is 2, and the toy plugin's module."""

    def make(answers, *transforms: str, **rollout):
        client = FakeClient(answers)
        monkeypatch.setattr(sampler_components, "GenerateClient", lambda url, **options: client)
        monkeypatch.setattr(sampler_components, "PromptEncoder", lambda folder, **_: encoder)
        data = tmp_path / "train.jsonl"
        data.write_text("\n".join(json.dumps({"prompt": prompt, "label": "2"}) for prompt in PROMPTS))
        chosen = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "sample_transforms": transforms, **rollout}
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(**chosen),
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
        )
        registry = activate(["grpo", plugin]).registry
        folder = tmp_path / "samples"
        settings = SamplerSettings(
            config, FOLDER, data, "http://unused", options={"core": config}, samples_folder=folder
        )
        toy = sys.modules[registry.plugins[-1].entry_point]
        return Sampler(settings, registry), client, toy

    return make


def written(tmp_path, rollout: int = 0) -> list[dict]:
    path = tmp_path / "samples" / f"train-{rollout:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_groups_without_spread_are_replaced_until_the_rollout_is_full(build, tmp_path):
    answers = {"1+1": SAME, "1+2": MIXED, "1+3": SAME, "1+4": MIXED, "1+5": MIXED}
    sampler, client, _ = build(answers, "drop_zero_std")
    sampled = await sampler.sample(0)
    assert [prompt for prompt, _, _ in client.requests] == ["1+1", "1+2", "1+3", "1+4"]
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 6, 7]
    metrics = sampled.metrics
    assert metrics["rollout/dropped/zero_std"] == 2.0
    assert metrics["rollout/refills"] == 2.0
    # Of what was generated, whatever was dropped.
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/zero_std_groups"] == 0.5
    assert sampled.warnings == []
    rows = [(row["index"], row.get("dropped")) for row in written(tmp_path)]
    assert rows == [(2, None), (3, None), (6, None), (7, None), *((i, "zero_std") for i in (0, 1, 4, 5))]


async def test_the_cursor_counts_every_prompt_that_was_taken_and_the_next_rollout_continues_there(build):
    answers = {"1+1": SAME, "1+2": MIXED, "1+3": MIXED, "1+4": MIXED, "1+5": MIXED}
    sampler, _, _ = build(answers, "drop_zero_std")
    await sampler.sample(0)
    cursor = sampler.cursor()
    assert cursor["source"]["next"] == 3
    again, _, _ = build(answers, "drop_zero_std")
    again.restore(cursor)
    assert (await again.sample(1)).shards[0].indices_B.tolist() == [6, 7, 8, 9]


async def test_an_aborted_group_is_put_back_and_neither_replaced_nor_transformed(build):
    answers = {"1+1": [answer("2"), answer("2", "abort")], "1+2": SAME, "1+3": MIXED}
    sampler, client, toy = build(answers, "log", "drop_zero_std")
    await sampler.sample(0)
    assert [prompt for prompt, _, _ in client.requests] == ["1+1", "1+2", "1+3"]
    assert [call[1] for call in toy.calls if call[0] == "log"] == [1, 2]
    cursor = sampler.cursor()["source"]
    assert (cursor["next"], cursor["returned"]) == (3, [0])


async def test_a_group_that_failed_is_not_replaced_and_a_failed_sample_is_not_shown_to_transforms(build):
    sampler, client, toy = build({"1+2": MIXED}, "log")
    sampled = await sampler.sample(0)
    assert [prompt for prompt, _, _ in client.requests] == ["1+1", "1+2"]
    assert [call for call in toy.calls if call[0] == "log"] == [("log", 1, [1.0, 0.0])]
    assert sampled.shards[0].indices_B.tolist() == [2, 3]


async def test_hooks_see_the_replacements_too_and_at_the_end_what_is_trained_on(build):
    sampler, _, toy = build({"1+1": SAME, "1+2": MIXED, "1+3": MIXED}, "drop_zero_std")
    await sampler.sample(7)
    assert toy.calls == [("before", 7, [0, 1]), ("before", 7, [2]), ("after", 7, [2, 3, 4, 5])]


async def test_a_hook_that_leaves_no_number_as_reward_is_named(build):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED})
    toy.spoiled.append(float("nan"))
    with pytest.raises(PluginError, match=r"slime_after_rollout \(toy\) .*sample 0 of group 0 .* nan;"):
        await sampler.sample(0)


@pytest.mark.parametrize("run_key", [None, "score"])
def test_the_reward_that_a_row_names_is_the_one_that_has_to_be_there(run_key):
    sample = Sample(reward={"acc": 1.0}, metadata={"reward_key": "acc"})
    refuse_unusable(sample, run_key, who="slime_after_rollout")
    sample.metadata["reward_key"] = "score"
    with pytest.raises(PluginError, match=r"slime_after_rollout .*\{'acc': 1.0\}"):
        refuse_unusable(sample, run_key, who="slime_after_rollout")


async def test_too_many_dropped_groups_end_the_run_with_reasons_and_counts(build, tmp_path):
    sampler, client, _ = build(dict.fromkeys(PROMPTS, SAME), "drop_zero_std", rollout_max_refills=2)
    with pytest.raises(RunError, match=r"rollout 4: 0 of 2 .* 2 .*\(rollout_max_refills\).* 6: zero_std 6\."):
        await sampler.sample(4)
    assert len(client.requests) == 6
    assert [row["dropped"] for row in written(tmp_path, 4)] == ["zero_std"] * 12


async def test_without_refills_what_is_kept_is_trained_on(build):
    sampler, client, _ = build({"1+1": SAME, "1+2": MIXED}, "drop_zero_std", rollout_max_refills=0)
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [2, 3]
    assert len(client.requests) == 2


async def test_transforms_run_in_the_order_in_which_they_are_named(build):
    answers = {"1+1": MIXED, "1+2": MIXED}
    sampler, _, toy = build(answers, "log", "halve", "log")
    sampled = await sampler.sample(0)
    first = [("log", 0, [1.0, 0.0]), ("log", 1, [1.0, 0.0])]
    last = [("log", 0, [0.5, 0.0]), ("log", 1, [0.5, 0.0])]
    hooks = [("before", 0, [0, 1])], [("after", 0, [0, 1, 2, 3])]
    assert toy.calls == [*hooks[0], *first, ("halve", [0, 1]), *last, *hooks[1]]
    assert sampled.metrics["rollout/changed/halved"] == 4.0
    assert sampled.metrics["rollout/raw_reward"] == 0.5


async def test_transforms_of_the_whole_rollout_see_every_group_again_when_one_was_replaced(build, tmp_path):
    answers = {"1+1": MIXED, "1+2": MIXED, "1+3": MIXED}
    sampler, _, toy = build(answers, "log", "drop_first")
    sampled = await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "halve"] == [("halve", [0, 1]), ("halve", [0, 1, 2])]
    # Each group was halved once, however often it was seen.
    assert [call for call in toy.calls if call[0] == "log"] == [("log", index, [1.0, 0.0]) for index in range(3)]
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 4, 5]
    assert sampled.metrics["rollout/dropped/first"] == 1.0
    assert sampled.metrics["rollout/changed/halved"] == 4.0
    assert [row["reward"] for row in written(tmp_path)] == [0.5, 0.0, 0.5, 0.0, 1.0, 0.0]


async def test_a_sample_that_is_taken_out_of_its_group_is_written_down(build, tmp_path):
    sampler, _, _ = build({"1+1": MIXED, "1+2": MIXED}, "first")
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [0, 2]
    assert [(row["index"], row.get("dropped")) for row in written(tmp_path)] == [
        *((0, None), (2, None), (1, "left_out"), (3, "left_out")),
    ]


async def test_a_sample_that_is_taken_out_of_the_list_itself_is_written_down_too(build, tmp_path):
    sampler, _, _ = build({"1+1": MIXED, "1+2": MIXED}, "pop")
    assert (await sampler.sample(0)).shards[0].indices_B.tolist() == [0, 2]
    assert [(row["index"], row.get("dropped")) for row in written(tmp_path)] == [
        *((0, None), (2, None), (1, "left_out"), (3, "left_out")),
    ]


@pytest.mark.parametrize("first", ["first", "pop"])
async def test_a_sample_that_is_taken_out_of_a_group_that_is_dropped_later_is_written_down(build, tmp_path, first):
    sampler, _, _ = build({"1+1": MIXED, "1+2": MIXED}, first, "drop_first", rollout_max_refills=0)
    assert (await sampler.sample(0)).shards[0].indices_B.tolist() == [2]
    assert {(row["index"], row.get("dropped")) for row in written(tmp_path)} == {
        *((2, None), (0, "first"), (1, "left_out"), (3, "left_out")),
    }


async def test_truncated_samples_are_masked_counted_and_keep_their_reward(build, tmp_path):
    cut = [answer("2"), answer("22", "length")]
    sampler, _, _ = build({"1+1": cut, "1+2": MIXED}, "mask_truncated")
    sampled = await sampler.sample(0)
    (shard,) = sampled.shards
    assert shard.loss_mask_U.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert sampled.metrics["rollout/changed/truncated"] == 1.0
    assert [row.get("masked") for row in written(tmp_path)] == [None, True, None, None]


async def test_evaluations_are_not_transformed(build, tmp_path):
    sampler, _, toy = build(dict.fromkeys(PROMPTS, SAME), "log", "drop_zero_std")
    (one,) = eval_sets(RunConfig(eval=EvalConfig(eval_prompt_data=(("sums", tmp_path / "train.jsonl"),))))
    sampler.evaluation._sets = {"sums": sampler.evaluation._load(one)}
    assert (await sampler.evaluate(0))["eval/sums"] == 1.0
    assert toy.calls == []


@pytest.mark.parametrize(
    ("name", "bad", "wrong"),
    [
        ("bad", "lambda samples: samples", "list; .*Transformed"),
        ("bad", "lambda samples: Transformed([])", "at least one Sample"),
        ("bad", "lambda samples: Transformed(samples + samples)", "sample 0 of group 0"),
        ("bad", "lambda samples: Transformed(samples, dropped='a b')", "'a b'"),
        ("bad", "lambda samples: Transformed(samples, changed={'x': -1})", r"changed\['x'\] is -1"),
        ("bad_rollout", "lambda groups: groups", "list; .*Transformed"),
        ("bad_rollout", "lambda groups: []", "0 groups for 2 groups"),
        ("bad_rollout", "lambda groups: None", "NoneType for 2 groups"),
        ("bad_rollout", "lambda groups: [Transformed(group) for group in groups[::-1]]", "sample 2 of group 1"),
    ],
)
async def test_a_broken_contract_names_plugin_and_component(build, name, bad, wrong):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED}, name)
    toy.BAD = eval(bad, vars(toy))
    with pytest.raises(PluginError, match=rf"^plugin 'toy' \(.*: sample transform {name!r} .*{wrong}"):
        await sampler.sample(0)


@pytest.mark.parametrize("reward", ["float('nan')", "None", "{'right': 1.0}"])
async def test_a_reward_that_cannot_be_trained_on_names_who_left_it(build, reward):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED}, "bad")

    def spoil(samples):
        samples[1].reward = eval(reward)
        return toy.Transformed(samples)

    toy.BAD = spoil
    with pytest.raises(PluginError, match=r"sample transform 'bad' .*sample 1 of group 0 .*reward"):
        await sampler.sample(0)


async def test_a_transform_that_fails_names_plugin_component_file_and_line(build, plugin):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED}, "bad")
    toy.BAD = None
    with pytest.raises(PluginError) as failure:
        await sampler.sample(0)
    line = PLUGIN.splitlines().index("        return BAD(samples)") + 1
    assert all(text in str(failure.value) for text in ("sample transform 'bad'", "TypeError", f"({plugin}:{line}, in "))
