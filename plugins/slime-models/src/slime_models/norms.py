"""Norms that Megatron's layers do not have; imports Megatron."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear

from slime_core.modeling.layers import RMSNorm

__all__ = ["LatentNorm", "NormedRowParallelLinear"]


class LatentNorm(RMSNorm):
    """Norm of compressed queries, keys and values, with an epsilon of 1e-6 regardless of ``rms_norm_eps``.

    Source: transformers, models/deepseek_v3/modeling_deepseek_v3.py, ``q_a_layernorm``.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: object) -> None:
        super().__init__(config, hidden_size, eps=1e-6, **options)


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """The output matrix of attention or MLP, followed by a norm before the residual is added (GLM-4).

    Arguments: as in Megatron's RowParallelLinear.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normed output [s, b, output_size] and no bias, as Megatron's RowParallelLinear."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
