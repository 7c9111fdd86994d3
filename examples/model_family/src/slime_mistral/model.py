"""Mistral (2310.06825): the layers of Llama with an independent head size; mbridge does not know its model type."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from slime_core.modeling import MBridgeSpec
from slime_mistral.plugin import refusals

__all__ = ["Mistral"]


class Mistral(MBridgeSpec):
    """Mistral 7B v0.3 and Mistral Nemo (2310.06825)."""

    unsupported = staticmethod(refusals)

    def bridge(self, model_type: str) -> type[object]:
        """See :meth:`MBridgeSpec.bridge`."""
        return mistral_bridge()


@cache
def mistral_bridge() -> type[object]:
    """Return the bridge of Mistral: each of Megatron's weights, and the checkpoint's weights that make it up."""
    from mbridge.core import LLMBridge

    layer = "model.layers.{layer_number}."

    class MistralBridge(LLMBridge):  # type: ignore[misc]
        _DIRECT_MAPPING: ClassVar[dict[str, str]] = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        }
        _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
            "self_attention.linear_qkv.layer_norm_weight": [f"{layer}input_layernorm.weight"],
            "self_attention.linear_qkv.weight": [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"],
            "self_attention.linear_proj.weight": [f"{layer}self_attn.o_proj.weight"],
        }
        _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
            "mlp.linear_fc1.layer_norm_weight": [f"{layer}post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": [f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"],
            "mlp.linear_fc2.weight": [f"{layer}mlp.down_proj.weight"],
        }

        def _build_config(self) -> Any:
            """Add fields of TransformerConfig to those that mbridge reads from every config."""
            return self._build_base_config(add_qkv_bias=False, qk_layernorm=False)

    return MistralBridge
