"""Norms that are not in Megatron's layers; imports Megatron."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from slime_core.modeling.layers import RMSNorm

__all__ = ["LatentNorm", "NormedRowParallelLinear"]


class LatentNorm(RMSNorm):
    """The norm of compressed queries, keys and values, which adds 1e-6 whatever ``rms_norm_eps`` says.

    Source: transformers, models/deepseek_v3/modeling_deepseek_v3.py, ``q_a_layernorm``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: object) -> None:
        super().__init__(config, hidden_size, eps=1e-6, **options)


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """The last matrix of attention or MLP, and a norm of its output before the residual is added (GLM-4).

    Arguments: those of Megatron's RowParallelLinear.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As upstream: [s, b, output_size] and no bias."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
