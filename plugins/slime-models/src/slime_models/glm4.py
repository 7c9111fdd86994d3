"""Dense GLM-4 and GLM-Z1 of April 2025 (transformers, models/glm4): norms before and after attention and MLP, half of
each head rotated in interleaved pairs, gate and up projection in one matrix.

mbridge has no dense GLM-4, so this file defines a bridge of the same kind.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from slime_core.modeling import MBridgeSpec, local_layers
from slime_models import refusals

__all__ = ["Glm4"]


def sandwich_layers(config: Any, *, vp_stage: int | None = None) -> Any:
    """Return local layers with a norm after the output matrix of attention and MLP."""
    from slime_models.norms import NormedRowParallelLinear

    block = local_layers(config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.linear_proj = NormedRowParallelLinear
        layer.submodules.mlp.submodules.linear_fc2 = NormedRowParallelLinear
    return block


class Glm4(MBridgeSpec):
    """Builds dense GLM-4 models and maps their weights both ways."""

    unsupported = staticmethod(refusals.glm4)
    layers = staticmethod(sandwich_layers)

    def bridge(self, model_type: str) -> type[object]:
        """See :meth:`MBridgeSpec.bridge`."""
        return glm4_bridge()


@cache
def glm4_bridge() -> type[object]:
    """Return the bridge of dense GLM-4."""
    from mbridge.core import LLMBridge

    layer = "model.layers.{layer_number}."

    class Glm4Bridge(LLMBridge):  # type: ignore[misc]
        _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
            **LLMBridge._ATTENTION_MAPPING,
            "self_attention.linear_proj.post_layernorm.weight": [f"{layer}post_self_attn_layernorm.weight"],
        }
        _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
            **LLMBridge._MLP_MAPPING,
            "mlp.linear_fc1.weight": [f"{layer}mlp.gate_up_proj.weight"],
            "mlp.linear_fc2.post_layernorm.weight": [f"{layer}post_mlp_layernorm.weight"],
        }

        def _build_config(self) -> Any:
            return self._build_base_config(
                add_qkv_bias=self.hf_config.attention_bias, qk_layernorm=False, rotary_interleaved=True
            )

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {**super()._get_gptmodel_args(), "rotary_percent": self.hf_config.partial_rotary_factor}

    return Glm4Bridge
