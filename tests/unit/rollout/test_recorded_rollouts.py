"""A saved rollout becomes the very shards that it became when it was generated."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.config.learning import LearnerConfig
from slime_core.config.schema import DebugConfig
from slime_core.errors import EngineError
from slime_core.generation import Generation
from slime_core.types import TrainBatch


class Engines:
    """Answers 2, then 3, ... with log-probabilities that no short decimal has; the prompt 4+4 fails."""

    def __init__(self) -> None:
        self.made_with: dict[str, Any] = {}
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
def build(tmp_path: Path, make_sampler: Callable[..., Any]) -> Any:
    """Builds a live sampler that saves to 0.jsonl, 1.jsonl ... (or does not: None), or one that reads those."""
    rows = [{"prompt": f"{n}+{n}", "label": str(2 * n)} for n in (1, 2, 4)]
    rollout = {"rollout_batch_size": 3, "n_samples_per_prompt": 4, "rollout_temperature": 0.7}
    learner = LearnerConfig(num_steps_per_rollout=2, max_tokens_per_gpu=12)

    def make(*plugins: Path, saves: bool | None = True, **debug: Any) -> Any:
        files = tmp_path / "{rollout_id}.jsonl"
        debug |= {True: {"save_debug_rollout_data": files}, False: {"load_debug_rollout_data": files}, None: {}}[saves]
        sections = {"learner": learner, "debug": DebugConfig(**debug)}
        return make_sampler(Engines(), rows, rollout=rollout, plugins=plugins, num_ranks=2, **sections)

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
        assert second.metrics == {name: first.metrics[name] for name in first.metrics if "ledger" not in name}
        assert second.metrics["rollout/failed_ratio"] == pytest.approx(1 / 3)
        assert (again.cursor(), second.warnings) == (live.cursor(), first.warnings)
        assert again.cursor()["source"]["next"] in (3, 6, 0)


async def test_a_share_of_the_groups_is_trained(build: Any) -> None:
    await build().sample(0)
    sampled = await build(saves=False, load_debug_rollout_data_subsample=0.5).sample(0)
    assert sorted(index for shard in sampled.shards for index in shard.indices_B.tolist()) == [0, 1, 2, 3]
    assert sampled.metrics["rollout/failed_ratio"] == 0
