"""Tensors other than weights that a rank releases when it is offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.learner import process
from slime_core.learner.process import Offloader
from slime_core.learner.rank import LearnerRank


class WithoutModel:
    """An actor on a pipeline rank that holds and trains nothing."""

    model: tuple[Any, ...] = ()
    chunks: tuple[Any, ...] = ()
    optimizer = SimpleNamespace(zero_grad=lambda: None, chained_optimizers=())


def test_a_rank_that_sleeps_lets_go_of_the_returns_of_the_last_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.learner.process._drop_caches", lambda: None)  # Megatron's own, of a model
    learner: Any = object.__new__(LearnerRank)
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


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every allocation on the host, in small chunks."""
    sizes: list[int] = []
    empty = torch.empty

    def noted(size: int, **given: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size, **given)

    monkeypatch.setattr(process, "CHUNK", 64)
    monkeypatch.setattr(process, "ALIGNMENT", 8)
    monkeypatch.setattr(process, "torch", SimpleNamespace(**vars(torch) | {"empty": noted}))
    return sizes


def test_tensors_share_chunks_of_bounded_size_and_a_large_one_takes_several(allocations: list[int]) -> None:
    tensors = [torch.arange(count) + count for count in (3, 1, 20, 5)]  # 24, 8, 160 and 40 bytes
    before = [tensor.clone() for tensor in tensors]
    for rollout in range(2):
        allocations.clear()
        offloader = Offloader(tensors)
        assert offloader.offload() == 232
        assert [size for size in allocations if size] == [64, 64, 64, 40]
        offloader.restore()
        assert all(torch.equal(tensor, old + rollout) for tensor, old in zip(tensors, before, strict=True))
        for tensor in tensors:
            tensor += 1


def test_host_memory_is_page_locked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    empty = torch.empty
    monkeypatch.setattr(process.torch, "empty", lambda size, **given: (options.append(given), empty(size))[1])
    monkeypatch.setattr(process.torch.cuda, "is_available", lambda: True)
    process.HostChunks([8]).copy(torch.zeros(8, dtype=torch.uint8))
    assert options[-1] == {"dtype": torch.uint8, "pin_memory": True}
