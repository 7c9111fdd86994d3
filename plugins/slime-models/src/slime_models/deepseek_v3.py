"""DeepSeek V3, V3.1 and R1 (2412.19437), Kimi K2 (2507.20534) and Moonlight (2502.16982): multi-latent attention, first
dense layers and then mixtures of experts, which a sigmoid router with a bias selects, optionally in groups.

mbridge 0.15.1 maps the weights. Its conversion of the config is replaced: it ignores groups of experts, sets a field
that Megatron has removed, and reads weights with a Triton kernel.

Left out: multi-token prediction layers (the checkpoint's are not read), FP8 and INT4 weights (refused).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from slime_core.modeling import MBridgeSpec, ParallelLayout, local_layers
from slime_core.types import JsonValue
from slime_models import refusals
from slime_models.transformer_config import latent_attention, sigmoid_experts

__all__ = ["DeepseekV3", "latent_layers"]


class DeepseekV3(MBridgeSpec):
    """Builds models of DeepSeek-V3's architecture and maps their weights both ways."""

    unsupported = staticmethod(refusals.deepseek_v3)

    def bridge(self, model_type: str) -> type[object]:
        """See :meth:`MBridgeSpec.bridge`."""
        return latent_bridge()

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """See :meth:`MBridgeSpec.build`; Kimi's config has the fields of DeepSeek's, with another ``model_type``."""
        if config.get("model_type") == "kimi_k2":
            config = {**config, "model_type": "deepseek_v3"}
        self.layers = self.layers or latent_layers
        return super().build(config, dtype=dtype, parallel=parallel, overrides=overrides)


@cache
def latent_bridge() -> type[object]:
    """Return mbridge's bridge of DeepSeek-V3 with a replaced config."""
    from mbridge.core.bridge import Bridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    class LatentBridge(DeepseekV3Bridge):  # type: ignore[misc]
        def _build_config(self) -> Any:
            return self._build_base_config(**latent_attention(self.hf_config), **sigmoid_experts(self.hf_config))

        def _get_safetensor_io(self, weights_path: str) -> Any:
            return Bridge._get_safetensor_io(self, weights_path)

    return LatentBridge


def latent_layers(config: Any, *, vp_stage: int | None = None) -> Any:
    """Return local layers with multi-latent attention; its norms of compressed columns have an epsilon of 1e-6.

    Source: transformers, models/deepseek_v3.
    """
    from slime_models.latent_attention import PackedLatentAttention
    from slime_models.norms import LatentNorm

    block = local_layers(config, vp_stage=vp_stage, self_attention=PackedLatentAttention)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    return block
