from __future__ import annotations

import pytest
import torch

from slime_core.learner.frozen_models import WeightSnapshots
from slime_core.learner.trained_model import ACTOR, REFERENCE, TEACHER


class Model(list[torch.nn.Module]):
    """Two chunks whose weights all have one value each."""

    def __init__(self, *values: float) -> None:
        super().__init__([torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False)])
        self.fill(*values)

    def fill(self, *values: float) -> None:
        with torch.no_grad():
            for chunk, value in zip(self, values, strict=True):
                chunk.weight.fill_(value)

    @property
    def values(self) -> list[float]:
        return [chunk.weight.flatten()[0].item() for chunk in self]


def test_each_role_is_loaded_inside_its_block_only():
    model = Model(1, 2)
    roles = WeightSnapshots(model)
    roles.snapshot(REFERENCE)
    model.fill(3, 4)
    roles.load(TEACHER, lambda: model.fill(5, 6))
    assert model.values == [3, 4]
    for role, values in ((REFERENCE, [1, 2]), (TEACHER, [5, 6]), (ACTOR, [3, 4]), (REFERENCE, [1, 2])):
        with roles.weights_of(role):
            assert model.values == values
        assert model.values == [3, 4]
    roles.snapshot(REFERENCE)
    model.fill(7, 8)
    with roles.weights_of(REFERENCE):
        assert model.values == [3, 4]
    assert (REFERENCE in roles, TEACHER in roles, ACTOR in roles) == (True, True, False)


def test_the_actor_is_back_after_a_failure():
    model = Model(1, 2)
    roles = WeightSnapshots(model)
    roles.snapshot(REFERENCE)
    model.fill(3, 4)
    with pytest.raises(KeyError), roles.weights_of(REFERENCE):
        raise KeyError
    assert model.values == [3, 4]


def test_the_actor_is_back_to_the_bit_and_where_it_was():
    model = Model(1, 2)
    roles = WeightSnapshots(model)
    roles.snapshot(REFERENCE)
    weight, odd = model[0].weight, torch.tensor([[float("nan"), -0.0]])
    with torch.no_grad():
        weight.copy_(odd)
    place = weight.data_ptr()
    with roles.weights_of(REFERENCE):
        assert weight.data_ptr() == place
    assert weight.data_ptr() == place
    assert torch.equal(weight.detach().view(torch.int32), odd.view(torch.int32))


def test_a_role_has_biases_of_routers_of_its_own_and_no_other_buffers():
    model = Model(1, 2)
    model[0].register_buffer("bias_of_experts", torch.tensor([1.0]))
    model[0].register_buffer("angles", torch.tensor([1.0]), persistent=False)
    roles = WeightSnapshots(model)

    def load() -> None:
        for buffer in model[0].buffers():
            buffer.fill_(5.0)

    roles.load(TEACHER, load)
    assert [buffer.item() for buffer in model[0].buffers()] == [1, 5]
    with roles.weights_of(TEACHER):
        assert [buffer.item() for buffer in model[0].buffers()] == [5, 5]


def test_a_role_that_cannot_be_loaded_changes_nothing():
    model = Model(3, 4)
    roles = WeightSnapshots(model)
    roles.load(TEACHER, lambda: model.fill(7, 8))

    def half() -> None:
        torch.nn.init.constant_(model[0].weight, 9)
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        roles.load(TEACHER, half)
    assert model.values == [3, 4]
    with roles.weights_of(TEACHER):
        assert model.values == [7, 8]
