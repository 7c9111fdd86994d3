"""Tensors other than weights that a rank releases when it is offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.learner.rank import Learner


class WithoutModel:
    """An actor on a pipeline rank that holds and trains nothing."""

    model: tuple[Any, ...] = ()
    optimizer = SimpleNamespace(zero_grad=lambda: None, is_stub_optimizer=True)


def test_a_rank_that_sleeps_lets_go_of_the_returns_of_the_last_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.learner.process._drop_caches", lambda: None)  # Megatron's own, of a model
    learner: Any = object.__new__(Learner)
    learner.actor, learner.critic, learner._offloader = WithoutModel(), None, None
    learner.returns_U = torch.ones(3)
    assert learner.sleep() == 0
    assert learner.returns_U is None
