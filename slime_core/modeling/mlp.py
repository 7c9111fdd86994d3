"""Parts of MLPs, in torch alone: the activation of a gated MLP, and a matrix product for all experts of a mixture.

:func:`swiglu` is ``silu(gate) * up``, which stores only its input for the backward pass. In Megatron's plain code
(transformer/mlp.py:251) torch stores three more tensors of the inner size. Megatron's fused kernel stores as little as
this function. But if it is not compiled, as on CPUs, it computes the derivative step by step in the dtype of its input,
which in bfloat16 adds a third to the error. The results here equal those of the plain code bit for bit.

Megatron's local layers call one expert after the other, with three kernels each. :func:`grouped_linear` multiplies the
tokens of all experts at once, by torch's grouped product. Experts keep separate parameters with Megatron's names, so
checkpoints, freezing and exports are unaffected. The matrices are stacked for each product, in forward and again in
backward: the copy costs their bytes once, and the stack is not kept in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, silu

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["grouped_linear", "is_swiglu", "swiglu"]


def is_swiglu(config: TransformerConfig) -> bool:
    """Return whether MLPs have the plain gated activation: without bias, limits or offsets of other families."""
    return (
        config.gated_linear_unit
        and config.activation_func is silu
        and not (config.add_bias_linear or config.bias_activation_fusion)
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0
    )


def swiglu(both: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``silu(gate) * up``, times ``scale``, in the dtype of ``both``: [..., inner].

    Megatron's MLPs call it where they expect TransformerEngine's activation.

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


def grouped_linear(tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Multiply each row by the transposed matrix of its group: [n, out].

    Arguments:
        tokens: [n, in], sorted by group.
        ends: int32 [groups], the end of each group; the last is n.
        weights: [out, in] for each group; a group without tokens gets a gradient of zeros.
    """
    product: torch.Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()  # the gradient of a sum has strides of 0, which grouped_mm refuses
        of_tokens: torch.Tensor | None = None
        of_weights: tuple[torch.Tensor | None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            of_tokens = grouped_mm(gradient, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = grouped_mm(gradient.t(), tokens, offs=ends).unbind()
        return of_tokens, None, *of_weights
