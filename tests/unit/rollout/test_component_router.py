"""Rows that name their own generate function or reward model, of either scope, mixed with rows that name none."""

from __future__ import annotations

import json
import sys

import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.options import PluginSettings
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import DataError
from slime_core.plugins.activation import activate
from slime_core.plugins.component import Kind
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import sampler_components
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.types import Sample
from tests.unit.rollout.test_sampler import FOLDER, FakeClient, answer

PLUGIN = """
from slime_core import Component, GenerateTraits, RewardTraits, Sample, Status, hookimpl

calls = []


class Ranked:
    def __init__(self, options, run):
        calls.append(("made", "ranked"))

    async def score(self, samples):
        calls.append(("ranked", [sample.index for sample in samples]))
        return [float(rank) for rank, _ in enumerate(samples)]


class Length:
    def __init__(self, options, run):
        calls.append(("made", "length"))

    async def score(self, samples):
        calls.append(("length", [sample.index for sample in samples]))
        return [float(sample.response_length) for sample in samples]


class Constant:
    def __init__(self, options, run):
        pass

    async def __call__(self, context, sample, sampling):
        calls.append(("constant", sample.index))
        # A new sample, without the row's metadata: what the row names still holds.
        return Sample(tokens=[6, 7, 1], response_length=2, rollout_log_probs=[-1.0, -1.0], status=Status.COMPLETED)


class Forked:
    def __init__(self, options, run):
        pass

    async def __call__(self, context, sample, sampling):
        # One generation, two samples that are trained on: they share a rollout.
        made = dict(rollout_id=sample.index, response_length=2, rollout_log_probs=[-1.0, -1.0])
        return [Sample(tokens=[6, last, 1], status=Status.COMPLETED, **made) for last in (7, 8)]


@hookimpl
def slime_register_reward_models():
    yield Component("ranked", target=f"{__name__}:Ranked", traits=RewardTraits(scope="group"))
    yield Component("length", target=f"{__name__}:Length", traits=RewardTraits(scope="sample"))


@hookimpl
def slime_register_generate_functions():
    yield Component("constant", target=f"{__name__}:Constant", traits=GenerateTraits(scope="sample"))
    yield Component("forked", target=f"{__name__}:Forked", traits=GenerateTraits(scope="sample"))
"""

ANSWERS = {f"1+{n}": [answer("2"), answer("33")] for n in range(1, 5)}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A sampler over the rows that are given, one group of 2 samples a row; the toy plugin's module; and the client."""
    (tmp_path / "toy.py").write_text(PLUGIN)
    encoder = PromptEncoder(FOLDER, apply_chat_template=False)

    def make(*metadata, provided: PluginSettings | None = None, **rollout):
        client = FakeClient(ANSWERS)
        monkeypatch.setattr(sampler_components, "GenerateClient", lambda url, **options: client)
        monkeypatch.setattr(sampler_components, "PromptEncoder", lambda folder, **_: encoder)
        data = tmp_path / "train.jsonl"
        rows = [{"prompt": f"1+{n}", "label": "2", "metadata": row} for n, row in enumerate(metadata, start=1)]
        data.write_text("\n".join(map(json.dumps, rows)))
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(rollout_batch_size=len(rows), n_samples_per_prompt=2, **rollout),
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
        ).with_plugins(provided or PluginSettings())
        registry = activate(["grpo", str(tmp_path / "toy.py")]).registry
        folder = tmp_path / "samples"
        settings = SamplerSettings(config, FOLDER, data, "http://unused", samples_folder=folder)
        return Sampler(settings, registry), sys.modules[registry.plugins[-1].entry_point], client

    yield make
    for name in [name for name in sys.modules if name.startswith("slime_local_")]:
        del sys.modules[name]


def rewards(tmp_path) -> list[float]:
    lines = (tmp_path / "samples" / "train-000000.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


async def test_rows_are_rewarded_by_what_they_name_and_others_by_what_the_run_names(build, tmp_path):
    sampler, toy, _ = build({}, {"rm_type": "ranked"}, {"rm_type": "length"}, {"rm_type": None})
    await sampler.sample(0)
    assert rewards(tmp_path) == [1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0]
    assert ("ranked", [2, 3]) in toy.calls


@pytest.mark.parametrize("default", ["ranked", "length"])
async def test_a_model_of_groups_gets_whole_groups_next_to_one_of_samples(build, tmp_path, default):
    other = {"ranked": "length", "length": "ranked"}[default]
    names = [{"generate_function": "constant"}, {"rm_type": other, "generate_function": "constant"}]
    sampler, toy, _ = build(*names, rm_type=default)
    await sampler.sample(0)
    ranked = [call for call in toy.calls if call[0] == "ranked"]
    length = [call for call in toy.calls if call[0] == "length"]
    first, second = ([0, 1], [2, 3]) if default == "ranked" else ([2, 3], [0, 1])
    assert ranked == [("ranked", first)]
    assert sorted(length) == [("length", [index]) for index in second]


async def test_rows_are_generated_by_what_they_name_and_the_prompt_of_others_goes_to_the_engine(build):
    sampler, toy, client = build({"generate_function": "constant", "rm_type": "length"}, {})
    await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "constant"] == [("constant", 0), ("constant", 1)]
    assert [prompt for prompt, _, _ in client.requests] == ["1+2"]


async def test_a_component_that_rows_name_is_made_once_and_only_if_it_is_requested(build):
    sampler, toy, _ = build({"rm_type": "length"}, {"rm_type": "length"})
    await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "made"] == [("made", "length")]


async def test_the_field_that_slime_has_for_it_goes_before_the_metadata(build):
    sampler, _, _ = build({"generate_function": "single_turn"})
    sample = Sample(generate_function_path="constant", metadata={"generate_function": "single_turn"})
    assert sampler._collector._generators.of(sample).name == "constant"
    sample.generate_function_path = None
    assert sampler._collector._generators.of(sample).name == "single_turn"


@pytest.mark.parametrize("name", ["os:system", "toy.py", "my_lab.code", "lenght"])
async def test_a_row_names_a_component_and_never_code(build, name):
    sampler, _, _ = build({})
    with pytest.raises(DataError) as failure:
        sampler._collector._rewards.of(Sample(group_index=0, index=0, metadata={"rm_type": name}))
    text = str(failure.value)
    assert text.startswith(f"sample 0 of group 0: metadata rm_type = {name!r} ")
    assert ", ".join(sampler._components._registry.names(Kind.REWARD_MODEL)) in text
    assert ("did you mean 'length'?" in text) == (name == "lenght")


async def test_a_plugin_that_scores_every_sample_goes_before_what_rows_name(build, tmp_path):
    sampler, _, _ = build(
        {"rm_type": "what slime ignores"}, provided=PluginSettings(provided={"reward_model": ("mine = true",)})
    )
    await sampler.sample(0)
    assert rewards(tmp_path) == [1.0, 0.0]


async def test_a_model_of_groups_sees_every_sample_that_the_groups_prompts_fanned_out_into(build, tmp_path):
    sampler, toy, _ = build({}, {}, rm_type="ranked", generate_function="forked")
    await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "ranked"] == [("ranked", [0, 0, 1, 1]), ("ranked", [2, 2, 3, 3])]
    assert rewards(tmp_path) == [0.0, 1.0, 2.0, 3.0] * 2


async def test_a_sum_adds_weighted_rewards_and_reports_its_parts(build, tmp_path):
    sampler, toy, _ = build({}, {"rm_type": "exact_match"}, rm_type="2*length-1*ranked")
    sampled = await sampler.sample(0)
    assert rewards(tmp_path) == [2 * 2 - 0, 2 * 3 - 1, 1.0, 0.0]
    assert sampled.metrics["rollout/reward_parts/length"] == 2.5
    assert sampled.metrics["rollout/reward_parts/ranked"] == 0.5
    assert ("ranked", [0, 1]) in toy.calls


async def test_a_row_may_name_a_sum_whose_parts_are_made_once(build, tmp_path):
    sampler, toy, _ = build({"rm_type": "1*length+1*exact_match"}, {"rm_type": "3*length"}, rm_type="length")
    await sampler.sample(0)
    assert rewards(tmp_path) == [3.0, 3.0, 6.0, 9.0]
    assert [call for call in toy.calls if call[0] == "made"] == [("made", "length")]


def test_a_part_that_no_plugin_offers_is_refused(build):
    refusal = r"line 1: metadata rm_type = '1\*length\+1\*lenght' names no reward model of the run's"
    with pytest.raises(DataError, match=refusal):
        build({"rm_type": "1*length+1*lenght"})
