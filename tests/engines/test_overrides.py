"""Fields of Megatron's TransformerConfig that learner and engine do not both follow are refused, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.errors import ConfigError
from slime_core.modeling import MBridgeSpec
from slime_core.modeling.spec import FOLLOWED

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

OTHER: dict[str, Any] = {
    "softmax_type": "learnable",
    "softmax_scale": 0.5,
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.3,
    "qk_clip": True,
    "qk_l2_norm": True,
    "attention_output_gate": True,
    "apply_query_key_layer_scaling": True,
    "attention_softmax_in_fp32": False,
    "fp32_residual_connection": True,
    "apply_residual_connection_post_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "normalization": "LayerNorm",
    "no_rope_freq": 4,
    "window_size": [8, 0],
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "fp16": True,
    "params_dtype": torch.bfloat16,
    "tensor_model_parallel_size": 2,
    "batch_p2p_comm": True,
    "deterministic_mode": True,
    "cpu_offloading": True,
    "fp8": "e4m3",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_drop_policy": "position",
    "moe_input_jitter_eps": 0.1,
    "moe_router_force_load_balancing": True,
    "moe_router_topk_limited_devices": 1,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_latent_size": 16,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
}


def build(megatron: Any, spec: MBridgeSpec | None = None, **overrides: Any) -> Any:
    spec = MBridgeSpec(None, RunView()) if spec is None else spec
    return spec.build(DENSE, dtype=torch.float32, parallel=megatron, overrides=overrides)


@pytest.mark.parametrize("field", OTHER)
def test_what_learner_and_engine_do_not_both_follow_is_refused_by_name(megatron, field):
    with pytest.raises(ConfigError, match=rf"MBridgeSpec sets {field} = "):
        build(megatron, **{field: OTHER[field]})


def test_every_wrong_field_is_named_at_once(megatron):
    with pytest.raises(ConfigError, match=r"softmax_type = 'learnable'.*qk_clip = True"):
        build(megatron, softmax_type="learnable", qk_clip=True, layernorm_epsilon=1e-6)


def test_a_field_that_megatron_does_not_have_is_refused_by_name(megatron):
    with pytest.raises(ConfigError, match="sets soft_max_type, which"):
        build(megatron, soft_max_type="vanilla")


def test_the_value_that_a_field_has_anyway_may_be_given(megatron):
    build(megatron, softmax_type="vanilla", qk_clip=False, mtp_num_layers=None, moe_expert_capacity_factor=None)


class Bridged(MBridgeSpec):
    """A family whose bridge, and not an override, sets the field."""

    def bridge(self, model_type: str) -> type[object]:
        registered: Any = super().bridge(model_type)

        class Other(registered):  # type: ignore[misc]
            def _build_config(self) -> Any:
                return self._build_base_config(qk_layernorm=True, qk_clip=True)

        return Other


def test_what_the_bridge_of_a_family_sets_is_refused_too(megatron):
    with pytest.raises(ConfigError, match=r"Bridged .*qk_clip = True .*False"):
        build(megatron, Bridged(None, RunView()))


def test_a_family_declares_what_its_layers_and_its_engine_follow(megatron):
    class Scaled(MBridgeSpec):
        follows = frozenset({"softmax_scale"})

    (chunk,) = build(megatron, Scaled(None, RunView()), softmax_scale=0.5)
    assert chunk.decoder.layers[0].self_attention.core_attention._scale == 0.5
    with pytest.raises(ConfigError, match="Scaled sets softmax_type = "):
        build(megatron, Scaled(None, RunView()), softmax_scale=0.5, softmax_type="learnable")


def test_the_fields_that_may_be_set_are_megatrons_and_those_of_its_flags_are_among_them(megatron):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from slime_core.config.engines import MEGATRON_FLAGS

    assert {one.name for one in dataclasses.fields(MLATransformerConfig)} >= FOLLOWED
    flags = {flag.field or name for name, flag in MEGATRON_FLAGS.items() if flag.home == "transformer"}
    assert flags <= FOLLOWED
