from __future__ import annotations

import pytest
import torch

from slime_core.learner.roles import Roles


@pytest.fixture
def chunks() -> list[torch.nn.Module]:
    return [torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False)]


def fill(chunks: list[torch.nn.Module], *values: float) -> None:
    with torch.no_grad():
        for chunk, value in zip(chunks, values, strict=True):
            chunk.weight.fill_(value)


def held(chunks: list[torch.nn.Module]) -> list[float]:
    return [chunk.weight.flatten()[0].item() for chunk in chunks]


def test_a_role_plays_for_the_length_of_the_block(chunks):
    roles = Roles(chunks)
    fill(chunks, 1, 2)
    roles.remember("reference")
    fill(chunks, 3, 4)
    with roles.playing("reference"):
        assert held(chunks) == [1, 2]
    assert held(chunks) == [3, 4]


def test_the_actor_is_back_after_a_failure(chunks):
    roles = Roles(chunks)
    fill(chunks, 1, 2)
    roles.remember("reference")
    fill(chunks, 3, 4)
    with pytest.raises(KeyError), roles.playing("reference"):
        raise KeyError
    assert held(chunks) == [3, 4]


def test_remembered_weights_do_not_follow_the_model_and_the_model_keeps_its_storage(chunks):
    roles = Roles(chunks)
    fill(chunks, 1, 2)
    storage = chunks[0].weight.data_ptr()
    roles.remember("reference")
    fill(chunks, 3, 4)
    roles.restore("reference")
    assert held(chunks) == [1, 2]
    assert chunks[0].weight.data_ptr() == storage
    fill(chunks, 5, 6)
    roles.restore("reference")
    assert held(chunks) == [1, 2]


def test_only_remembered_roles_are_known(chunks):
    roles = Roles(chunks)
    roles.remember("reference")
    assert "reference" in roles
    assert "critic" not in roles
