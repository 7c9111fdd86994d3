"""What the Llama of slime-models refuses; what it says and holds is compared in ``test_families.py``."""

from __future__ import annotations

import re

import pytest
import torch

from slime_core.errors import ConfigError
from slime_models.refusals import LLAMA_3, llama
from tests.engines.families import config_of, spec_of


@pytest.mark.parametrize(("name", "place"), [("attention_bias", "attention"), ("mlp_bias", "MLP")])
def test_biases_are_refused(megatron, name, place):
    with pytest.raises(ConfigError, match=rf"biases in its {place} \({name}\)"):
        spec_of("llama").build(config_of("llama", **{name: True}).to_dict(), dtype=torch.float32, parallel=megatron)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"rope_type": "linear"}, "rotary positions of type 'linear'"),
        ({"rope_type": "llama3", **LLAMA_3, "low_freq_factor": 2.0}, "low_freq_factor = 2.0; only 1.0 is built"),
    ],
)
def test_rotary_positions_that_megatron_scales_otherwise_are_refused(megatron, given, refusal):
    config = config_of("llama")
    config.rope_parameters = {"rope_theta": 1e5, "factor": 8.0, **given}
    with pytest.raises(ConfigError, match=refusal):
        spec_of("llama").build(config.to_dict(), dtype=torch.float32, parallel=megatron)


def test_scaled_positions_without_their_constants_are_refused():
    rope = {"rope_type": "llama3", "rope_theta": 1e5, "factor": 8.0, "high_freq_factor": 4.0}
    (found,) = llama({"rope_parameters": rope})
    assert re.search("'llama3' .*low_freq_factor .*original_max_position_embeddings", found)
    assert "high_freq_factor" not in found
