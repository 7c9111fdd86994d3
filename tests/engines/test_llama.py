"""What the Llama of slime-models refuses; what it says and holds is compared in ``test_families.py``."""

from __future__ import annotations

import pytest
import torch

from slime_core.errors import ConfigError
from tests.engines.families import config_of, spec_of


@pytest.mark.parametrize(("name", "place"), [("attention_bias", "attention"), ("mlp_bias", "MLP")])
def test_biases_are_refused(megatron, name, place):
    with pytest.raises(ConfigError, match=rf"biases in its {place} \({name}\)"):
        spec_of("llama").build(config_of("llama", **{name: True}).to_dict(), dtype=torch.float32, parallel=megatron)


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_scaled_rotary_positions_are_refused(megatron, kind):
    config = config_of("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e5, "factor": 8.0}
    with pytest.raises(ConfigError, match=f"rotary positions of type '{kind}'"):
        spec_of("llama").build(config.to_dict(), dtype=torch.float32, parallel=megatron)
