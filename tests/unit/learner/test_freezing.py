from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.learner.freezing import freeze, unsharded_names


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


@pytest.mark.parametrize(
    ("expressions", "expected"),
    [
        ({"frozen": ["embedding", r"layers\.2\."]}, NAMES[2:4]),
        ({"only": [r"layers\.3\.mlp", "attention"]}, [NAMES[0], NAMES[2], NAMES[3]]),
        ({}, NAMES),
    ],
)
def test_weights_whose_names_match_are_frozen_or_the_only_ones_that_train(expressions, expected):
    stage = Stage()
    freeze([stage], **expressions)
    assert [name for name, parameter in unsharded_names([stage]) if parameter.requires_grad] == expected


WRONG, NEAR = "decoder.layers.2.atention.weight", "decoder.layers.2.attention.weight"


@pytest.mark.parametrize(
    ("frozen", "names"), [(["mlp", WRONG], f"'{WRONG}' .* 5 .* {NEAR},"), (["."], r"\['.'\] .* 5 ")]
)
def test_an_expression_that_finds_nothing_or_everything_is_refused(frozen, names):
    with pytest.raises(ConfigError, match=f"freeze_params_name_list.*{names}"):
        freeze([Stage()], frozen=frozen)


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
