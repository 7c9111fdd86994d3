"""Qwen3 mixtures of experts (Qwen3 Technical Report, 2505.09388): every layer's MLP is a router and its experts.

``norm_topk_prob`` selects the weights of the chosen experts: a softmax over the chosen experts (true), or their part of
a softmax over all experts (false). Router scores are computed in float32. Only the policy loss trains the router: it
was balanced in pretraining, and a balancing loss would move it away from the engines' (router_aux_loss_coef is unused).

Left out: layers without experts between layers with experts (``decoder_sparse_step``, ``mlp_only_layers``), shared
experts, which no Qwen3 has, YaRN positions and sliding windows; all are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slime_core.modeling import MBridgeSpec, ParallelLayout
from slime_core.types import JsonValue
from slime_models import refusals

__all__ = ["Qwen3Moe"]


class Qwen3Moe(MBridgeSpec):
    """Builds Qwen3 mixtures of experts and maps their weights both ways."""

    unsupported = staticmethod(refusals.qwen3_moe)

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """See :meth:`MBridgeSpec.build`."""
        router: dict[str, JsonValue] = {
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
        }
        return super().build(config, dtype=dtype, parallel=parallel, overrides={**router, **(overrides or {})})
