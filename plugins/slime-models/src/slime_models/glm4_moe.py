"""GLM-4.5, 4.6 and 4.7 (2508.06471): grouped-query attention with biases, half of each head rotated, first dense layers
and then mixtures of experts, which a sigmoid router with a bias selects.

mbridge maps the weights. Biases and norms of the attention follow the checkpoint's config, and there is no router loss.

Left out: multi-token prediction layers (the checkpoint's are not read) and FP8 weights (refused).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from slime_core.modeling import MBridgeSpec
from slime_models import refusals
from slime_models.transformer_config import sigmoid_experts

__all__ = ["Glm4Moe"]


class Glm4Moe(MBridgeSpec):
    """Builds GLM-4.5's mixtures of experts and maps their weights both ways."""

    unsupported = staticmethod(refusals.glm4_moe)

    def bridge(self, model_type: str) -> type[object]:
        """See :meth:`MBridgeSpec.bridge`."""
        return glm4_moe_bridge()


@cache
def glm4_moe_bridge() -> type[object]:
    """Return mbridge's bridge of GLM-4.5 with a replaced config."""
    from mbridge.models.glm4moe import GLM4MoEBridge

    class Glm4MoeBridge(GLM4MoEBridge):  # type: ignore[misc]
        def _build_config(self) -> Any:
            return self._build_base_config(
                add_qkv_bias=self.hf_config.attention_bias,
                qk_layernorm=self.hf_config.use_qk_norm,
                **sigmoid_experts(self.hf_config),
            )

    return Glm4MoeBridge
