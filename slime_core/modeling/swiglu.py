"""The activation of a gated MLP, ``silu(gate) * up``, which keeps nothing but its input for the backward pass.

In Megatron's plain code (transformer/mlp.py:251) torch keeps three more tensors of the inner size. Megatron's fused
kernel keeps as little as this one; but it computes the derivative in the type of its input, step by step, where it is
not compiled, as on CPUs, and in bfloat16 that adds a third to the error. Here all numbers are those of the plain code,
bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["SwiGLU", "is_swiglu", "swiglu"]


def is_swiglu(config: TransformerConfig) -> bool:
    """Whether MLPs have the plain gated activation: without bias, limits or offsets of other families."""
    return (
        config.gated_linear_unit
        and config.activation_func is silu
        and not (config.add_bias_linear or config.bias_activation_fusion)
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
    )


class SwiGLU:
    """:func:`swiglu` in the place that Megatron's MLPs have for an activation of TransformerEngine."""

    def __init__(self, config: TransformerConfig) -> None:
        assert is_swiglu(config)

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        return swiglu(both)


def swiglu(both: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``, times ``scale``, in the dtype of ``both``: [..., inner].

    Arguments:
        both: gate and up side by side, [..., 2 * inner].
        scale: of each token, [..., 1]; it may be float32 beside a ``both`` in bfloat16. None: 1.
    """
    product: torch.Tensor = _SwiGLU.apply(both, scale)  # type: ignore[no-untyped-call]
    return product


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(both, scale)
        gate, up = both.chunk(2, dim=-1)
        product = silu(gate) * up
        return product if scale is None else (product * scale).to(both.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        both, scale = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        activated = silu(gate)
        of_scale: torch.Tensor | None = None
        if scale is not None:
            gradient = gradient.to(torch.promote_types(both.dtype, scale.dtype))
            of_scale = (gradient * (activated * up)).sum(-1, keepdim=True).to(scale.dtype)
            gradient = (gradient * scale).to(both.dtype)
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return torch.cat([of_gate, gradient * activated], dim=-1), of_scale
