from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.errors import NonFiniteError
from slime_core.learner.checks import require_finite_weights
from slime_core.learner.critic import Critic, CriticRank


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_named(bad, dtype):
    chunks = [torch.nn.Linear(3, 3).to(dtype), torch.nn.Linear(3, 2).to(dtype)]
    with torch.no_grad():
        chunks[1].weight[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"rollout 4: .* 1 weights .*, weight among .*--lr,"):
        require_finite_weights(chunks, rollout=4)


def test_chunks_of_the_same_names_are_all_looked_at():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    with torch.no_grad():
        first.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="in 1 weights"):
        require_finite_weights([first, second], rollout=0)


@pytest.mark.parametrize("largest", [0.0, 1.0, 3e38])
def test_large_weights_are_still_finite(largest):
    """The sum of their squares may not be."""
    chunk = torch.nn.Linear(40, 40)
    with torch.no_grad():
        chunk.weight.fill_(largest)
    require_finite_weights([chunk], rollout=0)


# --- A critic ---------------------------------------------------------------------------------------------------------


def spoilt_critic() -> Critic:
    """Takes a step along nothing, and has a weight that is NaN."""

    class Spoilt(Critic):
        def __init__(self) -> None:
            chunk: Any = torch.nn.Linear(2, 1)
            with torch.no_grad():
                chunk.bias[0] = math.nan
            self.trained: Any = SimpleNamespace(chunks=[chunk], finish_gather=lambda: None)

        def step(self, micro_batches: Any, *, rollout: int) -> dict[str, float]:
            return {}

    return Spoilt()


def test_a_separate_critic_checks_its_weights_before_a_rollout_ends(monkeypatch):
    rank: Any = object.__new__(CriticRank)
    rank.critic, rank._device = spoilt_critic(), "cpu"
    rank._steps, rank._shards, rank._places = [[]], [SimpleNamespace(rollout=4)], []
    monkeypatch.setattr("slime_core.learner.critic.gather_tokens", lambda *_: np.zeros(0, np.float32))
    with pytest.raises(NonFiniteError, match=r"rollout 4: .* 1 weights .*critic .*, bias among .*--critic-lr,"):
        rank.fit([])
