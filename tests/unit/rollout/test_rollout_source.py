"""Rollout sources of plugins, and hooks that change a rollout, in the real sampler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.errors import PluginError
from slime_testing.fake_engine import FakeEngine

SOURCE = """
from slime_core import hookimpl, Status
from slime_core.provisional import TrainSamples

@hookimpl
def slime_register(add):
    add.rollout_source("given", Given)

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

Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path, make_sampler: Callable[..., Any]) -> Build:
    """A sampler whose source is ``given`` of a plugin with ``text``."""

    def make(text: str = SOURCE, *more: Path, url: str = "http://unused", **rollout: Any) -> Any:
        plugin = tmp_path / "given.py"
        plugin.write_text(text)
        rows = [{"prompt": f"{n}+1", "label": str(n + 1)} for n in range(1, 7)]
        return make_sampler(
            None, rows, rollout={"rollout_source": "given", **rollout}, plugins=[plugin, *more], url=url
        )

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
        "\nfrom slime_core.provisional import TrainSamples\n"
        "\n@hookimpl\ndef slime_before_shards(rollout, samples):\n"
        "    for sample in samples[:2]:\n        sample.reward = rollout - sample.index\n"
        "    return TrainSamples(samples[:2], rewards_are_advantages=True)\n"
    )
    (shard,) = (await build(text).sample(5)).shards
    assert shard.columns_B["advantages"].tolist() == [5, 4]


async def test_of_two_plugins_that_replace_the_samples_the_last_named_decides(build: Build, tmp_path: Path) -> None:
    imported = "\nfrom slime_core.provisional import TrainSamples\n"
    hook = imported + "\n@hookimpl\ndef slime_before_shards(samples):\n    return TrainSamples(samples[:%s])\n"
    other = tmp_path / "other.py"
    other.write_text("from slime_core import hookimpl\n" + hook % 4)
    shards = (await build(SOURCE + hook % 2, other).sample(0)).shards
    assert sum(len(shard.lengths_B) for shard in shards) == 4


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
