from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.learner.trained_model import freeze, unsharded_names


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.attention = torch.nn.Linear(2, 2, bias=False)
        self.mlp = torch.nn.Linear(2, 2, bias=False)


class Stage(torch.nn.Module):
    """Layers 3 and 4 of a model whose earlier ones are on another pipeline rank, and the tied output matrix."""

    share_embeddings_and_output_weights = True
    config = SimpleNamespace(recompute_granularity=None, expert_model_parallel_size=1)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([Layer(3), Layer(4)])
        self.output_layer = torch.nn.Linear(2, 2, bias=False)


NAMES = [
    "decoder.layers.2.attention.weight",
    "decoder.layers.2.mlp.weight",
    "decoder.layers.3.attention.weight",
    "decoder.layers.3.mlp.weight",
    "embedding.word_embeddings.weight",
]


def trained(stage: Stage) -> list[str]:
    return [name for name, parameter in unsharded_names([stage]) if parameter.requires_grad]


def test_names_are_those_of_the_whole_model():
    assert [name for name, _ in unsharded_names([Stage()])] == NAMES


def test_matching_weights_are_frozen_and_the_rest_trains():
    stage = Stage()
    freeze([stage], frozen=["embedding", r"layers\.2\."])
    assert trained(stage) == NAMES[2:4]


def test_only_what_an_expression_finds_trains():
    stage = Stage()
    freeze([stage], only=[r"layers\.3\.mlp", "attention"])
    assert trained(stage) == [NAMES[0], NAMES[2], NAMES[3]]


def test_without_expressions_everything_trains():
    stage = Stage()
    freeze([stage])
    assert trained(stage) == NAMES


def test_an_expression_that_finds_nothing_is_refused_with_what_is_near():
    wrong, near = "decoder.layers.2.atention.weight", "decoder.layers.2.attention.weight"
    with pytest.raises(ConfigError, match=f"freeze_params_name_list: '{wrong}' .* 5 .* {near},"):
        freeze([Stage()], frozen=["mlp", wrong])


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match=r"freeze_params_name_list = \['.'\] .* 5 "):
        freeze([Stage()], frozen=["."])


# --- Where gradients start --------------------------------------------------------------------------------------------


class First(torch.nn.Module):
    """The first stage of a model."""

    def __init__(self, *, recompute: str | None = None, expert: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(recompute_granularity=recompute, expert_model_parallel_size=expert)
        self.embedding = torch.nn.Embedding(3, 2)
        self.mlp = torch.nn.Linear(2, 2)


def needs_gradient(stage: First) -> bool:
    return stage.embedding(torch.tensor([1])).requires_grad


@pytest.mark.parametrize(
    ("stage", "frozen", "expected"),
    [
        ({}, "embedding", False),
        ({"recompute": "full"}, "embedding", True),
        ({"recompute": "selective"}, "embedding", True),
        ({"expert": 2}, "embedding", True),
        ({}, "mlp", True),
        ({"recompute": "full"}, "mlp", True),
    ],
)
def test_recomputed_layers_and_shared_experts_see_an_input_that_needs_a_gradient(stage, frozen, expected):
    made = First(**stage)
    freeze([made], frozen=[frozen])
    assert needs_gradient(made) is expected
    with torch.no_grad():
        assert not needs_gradient(made)


def test_a_stage_that_trains_nothing_computes_no_gradients():
    first, last = First(recompute="full"), Stage()
    freeze([first, last], only=["attention"])
    assert not needs_gradient(first)
