"""A saved rollout becomes the very shards that it became when it was generated."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.config.learning import AlgorithmConfig, LearnerConfig
from slime_core.config.sampling import DataConfig, RolloutConfig
from slime_core.config.schema import DebugConfig, RunConfig
from slime_core.errors import EngineError, RunError
from slime_core.generation import Generation
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import sampler as module
from slime_core.rollout import sampler_components
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.types import TrainBatch

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"


class Engines:
    """Answers 2, then 3, ... with log-probabilities that no short decimal has; the prompt 4+4 fails."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    async def generate(self, input_ids: list[int], *, sampling: Any, n: int = 1) -> list[Generation]:
        if input_ids[0] == 9:
            raise EngineError("no engine answered")
        return [self._answer(digit) for digit in range(n)]

    def _answer(self, digit: int) -> Generation:
        log_probs = self.rng.normal(size=2).astype(np.float32)
        return Generation(array("i", [digit + 7, 1]), array("f", -abs(log_probs)), "stop", ("3",))

    async def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a live sampler that saves to 0.jsonl, 1.jsonl ... (or does not: None), or one that reads those."""
    encoder = PromptEncoder(FOLDER, apply_chat_template=False)
    monkeypatch.setattr(sampler_components, "GenerateClient", lambda *_, **__: Engines())
    monkeypatch.setattr(sampler_components, "PromptEncoder", lambda *_, **__: encoder)
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{one}+{one}", "label": str(2 * one)} for one in (1, 2, 4)]
    data.write_text("\n".join(map(json.dumps, rows)))

    def make(*plugins: str, saves: bool | None = True, num_ranks: int = 2, **debug: Any) -> Any:
        files = tmp_path / "{rollout_id}.jsonl"
        debug |= {True: {"save_debug_rollout_data": files}, False: {"load_debug_rollout_data": files}, None: {}}[saves]
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(rollout_batch_size=3, n_samples_per_prompt=4, rollout_temperature=0.7),
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
            learner=LearnerConfig(num_steps_per_rollout=2, max_tokens_per_gpu=12),
            debug=DebugConfig(**debug),
        )
        settings = SamplerSettings(config, FOLDER, data, "http://unused", num_ranks=num_ranks)
        registry = activate(["grpo", *plugins]).registry
        return Sampler(settings, registry)

    return make


def identical(one: TrainBatch, other: TrainBatch) -> bool:
    """Every column bit for bit, and the plan."""
    for name in (field.name for field in fields(TrainBatch)):
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            if (left.dtype, left.shape, left.tobytes()) != (right.dtype, right.shape, right.tobytes()):
                return False
        elif name == "columns_B":
            if {key: value.tobytes() for key, value in left.items()} != {k: v.tobytes() for k, v in right.items()}:
                return False
        elif left != right:
            return False
    return True


async def test_the_shards_metrics_and_cursor_are_those_of_the_live_run(build: Any) -> None:
    live, again = build(), build(saves=False)
    for rollout in (0, 1):
        first, second = await live.sample(rollout), await again.sample(rollout)
        assert len(first.shards) == len(second.shards) == 2
        assert all(identical(one, other) for one, other in zip(first.shards, second.shards, strict=True))
        assert first.metrics.pop("perf/tokens_per_gpu_per_sec") > 0
        assert second.metrics == first.metrics
        assert second.metrics["rollout/failed_ratio"] == pytest.approx(1 / 3)
        assert (again.cursor(), second.warnings) == (live.cursor(), first.warnings)
        assert again.cursor()["source"]["next"] in (3, 6, 0)


async def test_the_log_probs_of_the_test_need_every_digit(build: Any) -> None:
    (shard,) = (await build(num_ranks=1).sample(0)).shards
    assert any(np.float32(f"{one:.6g}") != one for one in shard.rollout_log_probs_U)


async def test_a_hook_sees_the_recorded_samples_without_its_own_changes(build: Any, tmp_path: Path) -> None:
    plugin = tmp_path / "halve.py"
    plugin.write_text(
        "from slime_core import hookimpl\n"
        "@hookimpl\ndef slime_after_rollout(rollout, samples):\n"
        "    for one in samples:\n        one.reward = one.reward / 2 + one.index\n"
    )
    first = await build(str(plugin)).sample(0)
    second = await build(str(plugin), saves=False).sample(0)
    rewards = [shard.columns_B["rewards"].tolist() for shard in first.shards]
    assert rewards == [shard.columns_B["rewards"].tolist() for shard in second.shards]
    assert max(max(row) for row in rewards) > 2


async def test_a_share_of_the_groups_is_trained(build: Any) -> None:
    await build().sample(0)
    sampled = await build(saves=False, load_debug_rollout_data_subsample=0.5).sample(0)
    assert sorted(index for shard in sampled.shards for index in shard.indices_B.tolist()) == [0, 1, 2, 3]
    assert sampled.metrics["rollout/failed_ratio"] == 0


async def test_too_few_samples_for_the_ranks_end_the_run(build: Any) -> None:
    await build().sample(0)
    with pytest.raises(RunError, match=r"rollout 0: 8 of 12 .* 10 "):
        await build(saves=False, num_ranks=5).sample(0)


async def test_reading_makes_no_component_that_generates_or_rewards(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await build().sample(0)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a component of the other half was made")

    monkeypatch.setattr(sampler_components, "GroupGenerator", refuse)
    monkeypatch.setattr(sampler_components.SamplerComponents, "make_prompts", refuse)
    assert len((await build(saves=False).sample(0)).shards) == 2


async def test_without_the_setting_nothing_is_written_and_no_sample_is_looked_at_for_it(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Recorded", None)
    await build(saves=None).sample(0)
    assert not list(tmp_path.glob("[0-9]*.jsonl"))
