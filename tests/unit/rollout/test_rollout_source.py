"""Rollout sources of plugins, and hooks that change a rollout, in the real sampler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import sampler_components
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_testing.fake_engine import FakeEngine

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
SOURCE = """
from slime_core import Component, Status, TrainSamples, hookimpl

@hookimpl
def slime_register_rollout_sources():
    yield Component("given", target=f"{__name__}:Given")

class Given:
    def __init__(self, options, run):
        self.rounds = 0

    async def fill(self, batch):
        while batch.missing:
            self.rounds += 1
            groups = batch.prompts.next_groups(batch.missing)
            for sample in (one for group in groups for one in group):
                sample.tokens, sample.response_length = [6, 15, 6, 7 + sample.index % 2, 1], 2
                sample.rollout_log_probs, sample.response = [-0.5, -0.25], str(2 + sample.index % 2)
                sample.status = Status.COMPLETED
            await batch.add(groups)
        return {"rollout/rounds": self.rounds}

    def state(self):
        return {"rounds": self.rounds}

    def restore(self, state):
        self.rounds = state["rounds"]
"""
ASKS = SOURCE.replace(
    "for sample in (one for group in groups for one in group):",
    """for group in groups:
                context, sampling = batch.generation(group[0])
                await generate_group(context, group, sampling)
                assert context.rollout == batch.rollout and not context.evaluation
                assert context.max_response_len == sampling.max_new_tokens
            for sample in ():""",
).replace("from slime_core import", "from slime_core.generation import generate_group\nfrom slime_core import")
PLAIN = "def fill(self, batch):\n        return {}\n"

Build = Callable[..., Sampler]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A sampler of two groups of two whose source is ``given`` of a plugin with ``text``."""
    encoder = PromptEncoder(FOLDER, apply_chat_template=False)
    monkeypatch.setattr(sampler_components, "PromptEncoder", lambda *_, **__: encoder)
    data = tmp_path / "train.jsonl"

    def make(
        text: str = SOURCE, *, url: str = "http://unused", ends: dict[str, Any] | None = None, **rollout: Any
    ) -> Sampler:
        metadata = {"metadata": {"sampling_params": ends}} if ends else {}
        rows = [{"prompt": f"{n}+1", "label": str(n + 1), **metadata} for n in range(1, 7)]
        data.write_text("\n".join(map(json.dumps, rows)))
        plugin = tmp_path / "given.py"
        plugin.write_text(text)
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(
                rollout_batch_size=2, n_samples_per_prompt=2, **{"rollout_source": "given", **rollout}
            ),
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
        )
        settings = SamplerSettings(config, FOLDER, data, url, samples_folder=tmp_path / "samples")
        return Sampler(settings, activate(["grpo", str(plugin)]).registry)

    return make


async def test_groups_of_a_source_are_rewarded_and_become_the_shards_of_the_rollout(build: Build) -> None:
    sampled = await build().sample(0)
    (shard,) = sampled.shards
    assert shard.indices_B.tolist() == [0, 1, 2, 3]
    assert shard.columns_B["rewards"].tolist() == [1, 0, 0, 1]  # 1+1: 2 is right; 2+1: 3 is
    assert shard.columns_B["advantages"].tolist() == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071], abs=1e-3)
    assert (sampled.metrics["rollout/rounds"], sampled.metrics["rollout/raw_reward"]) == (1, 0.5)
    assert sampled.metrics["ledger/trained"] == 2


async def test_a_source_generates_with_the_engines_of_the_run(build: Build) -> None:
    with FakeEngine(vocab_size=16, version="7") as engine:
        sampler = build(ASKS, url=engine.url, rollout_max_response_len=3)
        sampled = await sampler.sample(4)
        await sampler.close()
    (shard,) = sampled.shards
    assert len(engine.sampled) == 4
    made = [[*prompt, *response] for prompt, response in engine.sampled]
    assert [sequence.tolist() for sequence in np.split(shard.tokens_T, np.cumsum(shard.lengths_B)[:-1])] == made
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.bodies} == {3}


async def test_a_row_says_where_its_responses_end(build: Build) -> None:
    with FakeEngine(vocab_size=16) as engine:
        sampler = build(ASKS, url=engine.url, rollout_max_response_len=3, ends={"max_new_tokens": 2})
        await sampler.sample(0)
        await sampler.close()
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.bodies} == {2}


async def test_a_source_replaces_groups_that_transforms_drop(build: Build) -> None:
    text = SOURCE + (
        "\nfrom slime_core import Transformed\n"
        "\n@hookimpl\ndef slime_register_sample_transforms():\n"
        "    yield Component('late', target=f'{__name__}:Late')\n"
        "\nclass Late:\n    def __init__(self, options, run):\n        pass\n"
        "    def __call__(self, samples):\n"
        "        return Transformed(samples, dropped='early' if samples[0].group_index < 2 else None)\n"
    )
    sampled = await build(text, sample_transforms=("late",)).sample(0)
    assert sampled.shards[0].indices_B.tolist() == [4, 5, 6, 7]
    assert (sampled.metrics["rollout/rounds"], sampled.metrics["rollout/dropped/early"]) == (2, 2)


async def test_the_state_of_a_source_is_in_a_checkpoint_next_to_that_of_the_prompts(build: Build) -> None:
    first = build()
    await first.sample(0)
    cursor = json.loads(json.dumps(first.cursor()))
    second = build()
    second.restore(cursor)
    sampled = await second.sample(1)
    assert sampled.shards[0].indices_B.tolist() == [4, 5, 6, 7]
    assert sampled.metrics["rollout/rounds"] == 2


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('return {"rollout/rounds": self.rounds}', "return 3", " 3;"),
        ("self.rounds += 1", "raise KeyError('x')", r"KeyError: 'x' \(.*given.py:"),
        ("async def fill(self, batch):", f"{PLAIN}\n    async def other(self, batch):", "fill is not async"),
    ],
)
async def test_an_error_of_a_source_names_the_plugin(build: Build, old: str, new: str, names: str) -> None:
    with pytest.raises(PluginError, match=rf"(?s)given\.py.*'given'.*{names}"):
        await build(SOURCE.replace(old, new)).sample(0)


async def test_a_plugin_may_say_what_is_trained_before_it_is_cut_into_shards(build: Build) -> None:
    text = SOURCE + (
        "\n@hookimpl\ndef slime_before_shards(rollout, samples):\n"
        "    for sample in samples[:2]:\n        sample.reward = rollout - sample.index\n"
        "    return TrainSamples(samples[:2], rewards_are_advantages=True)\n"
    )
    (shard,) = (await build(text).sample(5)).shards
    assert shard.columns_B["advantages"].tolist() == [5, 4]


async def test_two_plugins_that_say_what_is_trained_are_refused(build: Build, tmp_path: Path) -> None:
    hook = "\n@hookimpl\ndef slime_before_shards(samples):\n    return TrainSamples(samples)\n"
    other = tmp_path / "other.py"
    other.write_text("from slime_core import TrainSamples, hookimpl\n" + hook)
    sampler = build(SOURCE + hook)
    hooks = activate(["grpo", str(tmp_path / "given.py"), str(other)]).registry
    sampler = Sampler(sampler._settings, hooks)
    with pytest.raises(PluginError, match=r"slime_before_shards .*given, other "):
        await sampler.sample(0)


async def test_samples_in_place_of_what_is_trained_are_refused(build: Build) -> None:
    text = SOURCE + "\n@hookimpl\ndef slime_before_shards(samples):\n    return samples\n"
    with pytest.raises(PluginError, match=r"slime_before_shards .*given .*\[.* TrainSamples"):
        await build(text).sample(0)


@pytest.mark.parametrize("logged", [True, False])
async def test_a_plugin_may_log_in_place_of_the_core(build: Build, logged: bool) -> None:
    text = SOURCE + f"\n@hookimpl\ndef slime_log_rollout(metrics):\n    metrics['mine'] = 1.0\n    return {logged}\n"
    found = (await build(text).sample(0)).metrics
    assert (found == {}) if logged else (found["mine"], found["rollout/raw_reward"]) == (1.0, 0.5)


async def test_all_groups_that_came_are_seen_with_the_prompts(build: Build) -> None:
    text = SOURCE + (
        "\n@hookimpl\ndef slime_after_collect(rollout, groups, prompts):\n"
        "    prompts.put_back([group for group in groups if group[0].group_index == 1])\n"
    )
    sampler = build(text)
    await sampler.sample(0)
    assert sampler.cursor()["source"]["returned"] == [1]
