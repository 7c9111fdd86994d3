"""What of a config.json our model specs refuse before anything starts, with the texts."""

from __future__ import annotations

import json
import re

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_models import refusals

FAMILIES = [refusals.qwen2, refusals.qwen3, refusals.qwen3_moe, refusals.llama]


@pytest.mark.parametrize("refuses", FAMILIES)
@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"rope_scaling": None, "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "hidden_act": "silu"},
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "full_attention"]},
        {"mlp_only_layers": None, "decoder_sparse_step": 1, "attention_bias": False, "mlp_bias": False},
    ],
)
def test_plain_models_are_built(refuses, plain):
    assert list(refuses(plain)) == []


def test_the_embedded_model_is_built():
    config = json.loads((ARITHMETIC / "model" / "config.json").read_text())
    assert list(refusals.qwen3(config)) == []


@pytest.mark.parametrize("refuses", FAMILIES)
@pytest.mark.parametrize(
    "scaled",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    ],
)
def test_scaled_positions_are_refused_however_they_are_written(refuses, scaled):
    (text,) = refuses(scaled)
    assert "'yarn'" in text
    assert "'default'" in text
    assert ("'llama3'" in text) == (refuses is refusals.llama)


@pytest.mark.parametrize("refuses", [refusals.qwen2, refusals.qwen3])
@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}, 1),
        ({"use_sliding_window": True, "num_hidden_layers": 36}, 1),  # the default is 28
        ({"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 2}, 0),
        ({"use_sliding_window": True, "sliding_window": None, "num_hidden_layers": 36}, 0),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 1),
    ],
)
def test_sliding_windows_are_refused_where_a_layer_has_one(refuses, config, count):
    assert ["sliding-window" in text for text in refuses(config)] == [True] * count


def test_windows_are_found_where_transformers_gives_them():
    from transformers import Qwen2Config, Qwen3Config

    for family, refuses in ((Qwen2Config, refusals.qwen2), (Qwen3Config, refusals.qwen3)):
        for layers, first in ((4, 3), (4, 4), (4, 5)):
            given = {"num_hidden_layers": layers, "max_window_layers": first, "use_sliding_window": True}
            assert list(refuses(given)) == list(refuses(family(**given).to_dict()))


@pytest.mark.parametrize("refuses", FAMILIES)
def test_other_activations_are_refused(refuses):
    (text,) = refuses({"hidden_act": "gelu"})
    assert re.search("'gelu'.*'silu'", text)


@pytest.mark.parametrize(
    ("refuses", "name"),
    [(refusals.qwen3, "attention_bias"), (refusals.llama, "attention_bias"), (refusals.llama, "mlp_bias")],
)
def test_biases_that_are_not_mapped_are_refused(refuses, name):
    (text,) = refuses({name: True})
    assert f"({name})" in text


@pytest.mark.parametrize(
    ("config", "accepted"),
    [
        ({"decoder_sparse_step": 2}, 1),
        ({"mlp_only_layers": [0]}, []),
        ({"attention_bias": True}, False),
        ({"use_sliding_window": True}, False),
        ({"shared_expert_intermediate_size": 8}, 0),
    ],
)
def test_more_than_a_plain_stack_of_mixtures_is_refused(config, accepted):
    ((name, value),) = config.items()
    (text,) = refusals.qwen3_moe(config)
    assert f"{name} = {value};" in text
    assert f" {accepted} " in text.partition(";")[2]


def test_all_that_is_refused_is_listed():
    assert len(list(refusals.llama({"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True}))) == 3
