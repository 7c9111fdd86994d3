"""Llama dense models (Llama 3, 2407.21783; Llama 2, 2307.09288; SmolLM2, 2502.02737): grouped-query attention, gated
SiLU, no biases; scaled rotary positions of Llama 3.1 and later.

mbridge maps the weights, but takes scaled positions for linear interpolation, so GPTModel's arguments are replaced.
Megatron scales with the constants of Llama 3 (rotary_pos_embedding.py, ``_apply_scaling``); others are refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from slime_core.modeling import MBridgeSpec
from slime_models import refusals

__all__ = ["Llama"]


class Llama(MBridgeSpec):
    """Builds Llama dense models and maps their weights both ways."""

    unsupported = staticmethod(refusals.llama)

    def bridge(self, model_type: str) -> type[object]:
        """See :meth:`MBridgeSpec.bridge`."""
        return llama_bridge()


@cache
def llama_bridge() -> type[object]:
    """Return mbridge's bridge of Llama with replaced rotary positions."""
    from mbridge.core import LLMBridge
    from mbridge.models.llama import LLaMABridge

    class LlamaBridge(LLaMABridge):  # type: ignore[misc]
        def _get_gptmodel_args(self) -> dict[str, Any]:
            args: dict[str, Any] = LLMBridge._get_gptmodel_args(self)
            rope = self.hf_config.rope_parameters
            if rope.get("rope_type") == "llama3":
                args |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
            return args

    return LlamaBridge
