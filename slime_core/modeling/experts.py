"""The experts of a mixture, as a few matrix products over all of them.

Megatron's local layers call one expert after the other, with three kernels each. Here torch's grouped product
multiplies the tokens of all experts at once. Experts keep separate parameters with Megatron's names, so checkpoints,
freezing and exports are unaffected. The matrices are stacked for each product, in forward and again in backward: the
copy costs their bytes once, and the stack is not kept in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from slime_core.modeling.swiglu import SwiGLU, swiglu

__all__ = ["GroupedExperts", "grouped_linear"]

ALIGNMENT_BYTES = 16
"""torch's grouped product requires rows that start at multiples of this (aten/native/GroupedMMUtils.h)."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts of one rank, computed together; replaces SequentialMLP in the layer spec."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute tokens [n, hidden], sorted by expert, with numbers of tokens and weights [n] -> [n, hidden].

        Arguments: as in Megatron's SequentialMLP.
        """
        tokens = permuted_local_hidden_states
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        if not (self._is_plain and tokens.numel() and _are_aligned(first[0], second[0])):
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(tokens, tokens_per_expert, permuted_probs)
            return found
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        inner = swiglu(grouped_linear(tokens, ends, first), permuted_probs.unsqueeze(-1))
        return grouped_linear(inner, ends, second), None

    @property
    def _is_plain(self) -> bool:
        has_swiglu = isinstance(self.local_experts[0].activation_func, SwiGLU)
        return has_swiglu and not self.config.moe_apply_probs_on_input


def _are_aligned(*weights: torch.Tensor) -> bool:
    return all(size * weight.element_size() % ALIGNMENT_BYTES == 0 for weight in weights for size in weight.shape)


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
