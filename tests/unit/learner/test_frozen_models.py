from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slime_core.learner.frozen_models import WeightSnapshots
from slime_core.learner.trained_model import ACTOR, REFERENCE, TEACHER


@pytest.fixture
def chunks() -> list[torch.nn.Module]:
    return [torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False)]


def fill(chunks: list[torch.nn.Module], *values: float) -> None:
    with torch.no_grad():
        for chunk, value in zip(chunks, values, strict=True):
            chunk.weight.fill_(value)


def held(chunks: list[torch.nn.Module]) -> list[float]:
    return [chunk.weight.flatten()[0].item() for chunk in chunks]


def filling(chunks: list[torch.nn.Module], *values: float) -> Callable[[], None]:
    return lambda: fill(chunks, *values)


def test_a_role_is_loaded_inside_the_block_only(chunks):
    roles = WeightSnapshots(chunks)
    fill(chunks, 1, 2)
    roles.snapshot(REFERENCE)
    fill(chunks, 3, 4)
    for _ in range(2):  # a swap leaves the role as it was, too
        with roles.weights_of(REFERENCE):
            assert held(chunks) == [1, 2]
        assert held(chunks) == [3, 4]


def test_roles_are_loaded_one_after_the_other(chunks):
    roles = WeightSnapshots(chunks)
    roles.load(REFERENCE, filling(chunks, 1, 2))
    roles.load(TEACHER, filling(chunks, 5, 6))
    fill(chunks, 3, 4)
    found = []
    for role in (REFERENCE, TEACHER, ACTOR, REFERENCE):
        with roles.weights_of(role):
            found.append(held(chunks))
    assert found == [[1, 2], [5, 6], [3, 4], [1, 2]]


def test_the_actor_is_back_after_a_failure(chunks):
    roles = WeightSnapshots(chunks)
    fill(chunks, 1, 2)
    roles.snapshot(REFERENCE)
    fill(chunks, 3, 4)
    with pytest.raises(KeyError), roles.weights_of(REFERENCE):
        raise KeyError
    assert held(chunks) == [3, 4]


def test_the_actor_is_back_to_the_bit_and_where_it_was(chunks):
    roles = WeightSnapshots(chunks)
    fill(chunks, 1, 2)
    roles.snapshot(REFERENCE)
    odd = torch.tensor([[float("nan"), -0.0]])
    with torch.no_grad():
        chunks[0].weight.copy_(odd)
    place = chunks[0].weight.data_ptr()
    with roles.weights_of(REFERENCE):
        assert chunks[0].weight.data_ptr() == place
    assert chunks[0].weight.data_ptr() == place
    assert torch.equal(chunks[0].weight.detach().view(torch.int32), odd.view(torch.int32))


def test_loading_a_role_leaves_the_actor_unchanged(chunks):
    roles = WeightSnapshots(chunks)
    fill(chunks, 3, 4)
    roles.load(TEACHER, filling(chunks, 7, 8))
    assert held(chunks) == [3, 4]
    with roles.weights_of(TEACHER):
        assert held(chunks) == [7, 8]
    assert ACTOR not in roles


def test_a_role_has_biases_of_routers_of_its_own_and_no_other_buffers(chunks):
    chunks[0].register_buffer("bias_of_experts", torch.tensor([1.0]))
    chunks[0].register_buffer("angles", torch.tensor([1.0]), persistent=False)
    roles = WeightSnapshots(chunks)

    def load() -> None:
        for buffer in chunks[0].buffers():
            buffer.fill_(5.0)

    roles.load(TEACHER, load)
    assert [buffer.item() for buffer in chunks[0].buffers()] == [1, 5]
    with roles.weights_of(TEACHER):
        assert [buffer.item() for buffer in chunks[0].buffers()] == [5, 5]


def test_a_role_that_cannot_be_loaded_changes_nothing(chunks):
    roles = WeightSnapshots(chunks)
    roles.load(TEACHER, filling(chunks, 7, 8))
    fill(chunks, 3, 4)

    def half() -> None:
        fill(chunks[:1], 9)
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        roles.load(TEACHER, half)
    assert held(chunks) == [3, 4]
    with roles.weights_of(TEACHER):
        assert held(chunks) == [7, 8]


def test_a_role_is_snapshotted_again(chunks):
    roles = WeightSnapshots(chunks)
    fill(chunks, 1, 2)
    roles.snapshot(REFERENCE)
    fill(chunks, 3, 4)
    roles.snapshot(REFERENCE)
    fill(chunks, 5, 6)
    with roles.weights_of(REFERENCE):
        assert held(chunks) == [3, 4]


def test_only_snapshotted_roles_are_known(chunks):
    roles = WeightSnapshots(chunks)
    roles.snapshot(REFERENCE)
    assert REFERENCE in roles
    assert TEACHER not in roles
