"""Rows that name their own generate function or reward model, of either scope, mixed with rows that name none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.options import PluginSettings
from slime_core.errors import DataError
from slime_core.plugins.registration import Kind
from slime_core.types import Sample
from tests.unit.rollout.samplers import FakeClient, answer, written

PLUGIN = """
from slime_core import hookimpl, Sample, Status

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
def slime_register(add):
    add.reward_model("ranked", Ranked, scope="group")
    add.reward_model("length", Length, scope="sample")
    add.generate_function("constant", Constant, scope="sample")
    add.generate_function("forked", Forked, scope="sample")
"""

ANSWERS = {f"1+{n}": [answer("2"), answer("33")] for n in range(1, 5)}


Build = Callable[..., tuple[Any, Any, FakeClient]]


@pytest.fixture
def build(tmp_path: Path, make_sampler: Callable[..., Any]) -> Build:
    """A sampler over rows with this metadata, one group of 2 samples a row; the toy plugin's module; and the client."""
    (tmp_path / "toy.py").write_text(PLUGIN)

    def make(*metadata: Any, provided: PluginSettings | None = None, **rollout: Any) -> tuple[Any, Any, FakeClient]:
        client = FakeClient(ANSWERS)
        rows = [{"prompt": f"1+{n}", "label": "2", "metadata": row} for n, row in enumerate(metadata, start=1)]
        settings = {"rollout_batch_size": len(rows), **rollout}
        plugins = [tmp_path / "toy.py"]
        sampler = make_sampler(client, rows, rollout=settings, plugins=plugins, provided=provided)
        return sampler, sampler._components._registry.loaded["toy"].holder, client

    return make


def rewards(folder: Path) -> list[float]:
    return [row["reward"] for row in written(folder)]


async def test_rows_are_rewarded_by_what_they_or_the_run_name(build: Build, tmp_path: Path) -> None:
    sampler, toy, _ = build({}, {"rm_type": "ranked"}, {"rm_type": "length"}, {"rm_type": None})
    await sampler.sample(0)
    assert rewards(tmp_path) == [1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0]
    assert ("ranked", [2, 3]) in toy.calls


async def test_rows_are_generated_by_what_they_name_and_the_prompt_of_others_goes_to_the_engine(build: Build) -> None:
    sampler, toy, client = build({"generate_function": "constant", "rm_type": "length"}, {})
    await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "constant"] == [("constant", 0), ("constant", 1)]
    assert [prompt for prompt, _, _ in client.requests] == ["1+2"]


async def test_the_field_that_slime_has_for_it_goes_before_the_metadata(build: Build) -> None:
    sampler, _, _ = build({"generate_function": "single_turn"})
    sample = Sample(generate_function_path="constant", metadata={"generate_function": "single_turn"})
    assert sampler._generator._generators.of(sample).name == "constant"
    sample.generate_function_path = None
    assert sampler._generator._generators.of(sample).name == "single_turn"


@pytest.mark.parametrize("name", ["os:system", "toy.py", "my_lab.code", "lenght"])
async def test_a_row_names_a_component_and_never_code(build: Build, name: str) -> None:
    sampler, _, _ = build({})
    with pytest.raises(DataError) as failure:
        sampler._generator._rewards.of(Sample(group_index=0, index=0, metadata={"rm_type": name}))
    text = str(failure.value)
    assert text.startswith(f"sample 0 of group 0: metadata rm_type = {name!r} ")
    assert ", ".join(sampler._components._registry.names(Kind.REWARD_MODEL)) in text
    assert ("did you mean length?" in text) == (name == "lenght")


async def test_a_plugin_that_scores_every_sample_goes_before_what_rows_name(build: Build, tmp_path: Path) -> None:
    sampler, _, _ = build(
        {"rm_type": "what slime ignores"}, provided=PluginSettings(provided={"reward_model": ("mine = true",)})
    )
    await sampler.sample(0)
    assert rewards(tmp_path) == [1.0, 0.0]


async def test_a_model_of_groups_sees_every_sample_that_prompts_fanned_out_into(build: Build, tmp_path: Path) -> None:
    sampler, toy, _ = build({}, {}, rm_type="ranked", generate_function="forked")
    await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "ranked"] == [("ranked", [0, 0, 1, 1]), ("ranked", [2, 2, 3, 3])]
    assert rewards(tmp_path) == [0.0, 1.0, 2.0, 3.0] * 2


async def test_a_sum_adds_weighted_rewards_and_reports_its_parts(build: Build, tmp_path: Path) -> None:
    sampler, toy, _ = build({}, {"rm_type": "exact_match"}, rm_type="2*length-1*ranked")
    sampled = await sampler.sample(0)
    assert rewards(tmp_path) == [2 * 2 - 0, 2 * 3 - 1, 1.0, 0.0]
    assert sampled.metrics["rollout/reward_parts/length"] == 2.5
    assert sampled.metrics["rollout/reward_parts/ranked"] == 0.5
    assert ("ranked", [0, 1]) in toy.calls


def test_a_part_that_no_plugin_offers_is_refused(build: Build) -> None:
    refusal = r"line 1: metadata rm_type = '1\*length\+1\*lenght' is no reward model"
    with pytest.raises(DataError, match=refusal):
        build({"rm_type": "1*length+1*lenght"})
