"""Tensors other than weights that a rank releases when it is offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.learner import process
from slime_core.learner.process import Offloader
from slime_core.learner.rank import Learner


class WithoutModel:
    """An actor on a pipeline rank that holds and trains nothing."""

    model: tuple[Any, ...] = ()
    chunks: tuple[Any, ...] = ()
    optimizer = SimpleNamespace(zero_grad=lambda: None, chained_optimizers=())


def test_a_rank_that_sleeps_lets_go_of_the_returns_of_the_last_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.learner.process._drop_caches", lambda: None)  # Megatron's own, of a model
    learner: Any = object.__new__(Learner)
    learner.actor, learner.critic, learner._offloader = WithoutModel(), None, None
    learner.returns_U = torch.ones(3)
    assert learner.offload() == 0
    assert learner.returns_U is None


def test_weights_stay_in_the_first_stage_and_leave_in_the_second() -> None:
    weights, moments, gradients = torch.arange(6.0), torch.arange(8.0), torch.ones(3)
    offloader = Offloader([weights, weights[2:], moments], [gradients])
    assert offloader.offload(but=[weights[:1]]) == 4 * (8 + 3)
    assert [one.untyped_storage().nbytes() for one in (weights, moments, gradients)] == [24, 0, 0]
    assert weights.tolist() == [0, 1, 2, 3, 4, 5]
    assert offloader.offload() == 4 * (6 + 8 + 3)
    assert offloader.offload() == 4 * (6 + 8 + 3)
    assert weights.untyped_storage().nbytes() == 0
    for _ in range(2):
        offloader.restore()
    assert (weights.tolist(), moments.tolist(), gradients.tolist()) == (
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 0],
    )


def test_a_large_tensor_is_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHUNK", 16)
    weights = torch.arange(10.0)  # 40 bytes
    assert [len(part) for part in process._to_host(weights.view(torch.uint8))] == [16, 16, 8]
    for rollout in range(3):
        offloader = Offloader([weights])
        offloader.offload()
        offloader.restore()
        assert weights.tolist() == [number + rollout for number in range(10)]
        weights += 1


def test_host_memory_is_page_locked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    empty = torch.empty
    monkeypatch.setattr(process.torch, "empty", lambda size, **given: (options.append(given), empty(size))[1])
    monkeypatch.setattr(process.torch.cuda, "is_available", lambda: True)
    process._to_host(torch.zeros(8, dtype=torch.uint8))
    assert options == [{"dtype": torch.uint8, "pin_memory": True}]
