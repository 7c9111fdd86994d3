"""The activation of a gated MLP, ``silu(gate) * up``, which stores only its input for the backward pass.

In Megatron's plain code (transformer/mlp.py:251) torch stores three more tensors of the inner size. Megatron's fused
kernel stores as little as this function. But if it is not compiled, as on CPUs, it computes the derivative step by step
in the dtype of its input, which in bfloat16 adds a third to the error. The results here equal those of the plain code
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
    """Return whether MLPs have the plain gated activation: without bias, limits or offsets of other families."""
    return (
        config.gated_linear_unit
        and config.activation_func is silu
        and not (config.add_bias_linear or config.bias_activation_fusion)
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
    )


class SwiGLU:
    """:func:`swiglu` as a module, in the place where Megatron's MLPs expect TransformerEngine's activation."""

    def __init__(self, config: TransformerConfig) -> None:
        assert is_swiglu(config)

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        return swiglu(both)


def swiglu(both: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``silu(gate) * up``, times ``scale``, in the dtype of ``both``: [..., inner].

    Arguments:
        both: gate and up concatenated, [..., 2 * inner].
        scale: of each token, [..., 1]; may be float32 although ``both`` is bfloat16. None: 1.
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
