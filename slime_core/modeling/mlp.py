"""Parts of MLPs, in torch alone: the activation of a gated MLP; sorting and multiplying the tokens of a mixture.

:func:`swiglu` is ``silu(gate) * up``, which stores only its input for the backward pass. In Megatron's plain code
(transformer/mlp.py:251) torch stores three more tensors of the inner size. Megatron's fused kernel stores as little as
this function. But if it is not compiled, as on CPUs, it computes the derivative step by step in the dtype of its input,
which in bfloat16 adds a third to the error. The results here equal those of the plain code bit for bit.

Megatron's local layers call one expert after the other, with three kernels each. :func:`grouped_linear` multiplies the
tokens of all experts at once, by torch's grouped product. Experts keep separate parameters with Megatron's names, so
checkpoints, freezing and exports are unaffected. If they lie at equal distances in memory, as those of a model that
trains do (:class:`~slime_core.modeling.experts.GroupedExperts`), the product reads them in place (:func:`stacked`).

:class:`Order` sorts the tokens of a mixture by expert, and adds up what the experts return. Nothing here waits for the
device: every shape follows from the number of tokens, and sums have a fixed order, so two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, silu

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["Order", "chosen_groups", "compile_swiglu", "grouped_linear", "is_swiglu", "stacked", "swiglu"]


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

    Megatron's MLPs call it instead of TransformerEngine's activation.

    Arguments:
        both: gate and up concatenated, [..., 2 * inner].
        scale: of each token, [..., 1]; may be float32 although ``both`` is bfloat16. None: 1.
    """
    product: torch.Tensor = _SwiGLU.apply(both, scale)  # type: ignore[no-untyped-call]
    return product


Function = TypeVar("Function", bound=Callable[..., object])


class Compiler(Protocol):
    """Returns a function that computes what its argument does."""

    def __call__(self, function: Function, /) -> Function: ...


def compile_swiglu(compile_function: Compiler) -> None:
    """Let :func:`swiglu` of this process compute with functions that ``compile_function`` returns, both ways."""
    _SwiGLU.value = staticmethod(compile_function(_gated))
    _SwiGLU.gradient = staticmethod(compile_function(_gated_gradient))


def _gated(both: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    product = silu(gate) * up
    return product if scale is None else (product * scale).to(both.dtype)


def _gated_gradient(
    gradient: torch.Tensor, both: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gate, up = both.chunk(2, dim=-1)
    activated = silu(gate)
    of_scale: torch.Tensor | None = None
    if scale is not None:
        gradient = gradient.to(torch.promote_types(both.dtype, scale.dtype))
        of_scale = (gradient * (activated * up)).sum(-1, keepdim=True).to(scale.dtype)
        gradient = (gradient * scale).to(both.dtype)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat([of_gate, gradient * activated], dim=-1), of_scale


class _SwiGLU(torch.autograd.Function):
    value: Callable[..., torch.Tensor] = staticmethod(_gated)
    gradient: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = staticmethod(_gated_gradient)

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(both, scale)
        return _SwiGLU.value(both, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _SwiGLU.gradient(gradient, *ctx.saved_tensors)


def chosen_groups(is_chosen: torch.Tensor, *, num: int) -> torch.Tensor:
    """Return the groups of each token in ascending order: int64 [t, num].

    Arguments:
        is_chosen: bool [t, groups], with ``num`` groups for each token. A token that has fewer gets further ones, in
            which its weight is 0.
    """
    return is_chosen.to(torch.uint8).topk(num, dim=1, sorted=False).indices.sort(dim=1).values


@dataclass(frozen=True, slots=True)
class Order:
    """One row for each group of each token, sorted by group; the rows of a group are in the order of tokens.

    Example: tokens with the groups ``[[0, 2], [0, 1]]`` have the rows ``[token 0, token 1, token 1, token 0]``:
    ``tokens_N = [0, 1, 1, 0]``, ``pairs_N = [0, 2, 3, 1]``, ``rows_TK = [[0, 3], [1, 2]]``, ``ends_G = [2, 3, 4]``.

    Arguments:
        tokens_N: int64 [t * k], the token of each row.
        pairs_N: int64 [t * k], the index of each row in the flattened [t, k].
        rows_TK: int64 [t, k], the rows of each token.
        ends_G: int32 [groups], the end of each group; the last is t * k.
    """

    tokens_N: torch.Tensor
    pairs_N: torch.Tensor
    rows_TK: torch.Tensor
    ends_G: torch.Tensor

    @classmethod
    def by_group(cls, groups_TK: torch.Tensor, *, num_groups: int) -> Self:
        """Sort by group.

        Arguments:
            groups_TK: int64 [t, k], below ``num_groups``.
        """
        groups_N, pairs_N = groups_TK.flatten().to(torch.int32).sort(stable=True)
        every = torch.arange(num_groups, dtype=torch.int32, device=groups_N.device)
        rows_TK = torch.empty_like(pairs_N).scatter_(0, pairs_N, torch.arange(len(pairs_N), device=pairs_N.device))
        return cls(
            tokens_N=pairs_N.div(groups_TK.size(1), rounding_mode="floor"),
            pairs_N=pairs_N,
            rows_TK=rows_TK.view_as(groups_TK),
            ends_G=torch.searchsorted(groups_N, every, right=True, out_int32=True),
        )

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copy the tokens [t, ...] into their rows: [t * k, ...]."""
        rows: torch.Tensor = _Spread.apply(tokens, self.tokens_N, self.rows_TK)  # type: ignore[no-untyped-call]
        return rows

    def spread_pairs(self, pairs_TK: torch.Tensor) -> torch.Tensor:
        """Copy a value of each token and group, [t, k], into its row: [t * k]."""
        rows: torch.Tensor = _Spread.apply(  # type: ignore[no-untyped-call]
            pairs_TK.flatten(), self.pairs_N, self.rows_TK.view(-1, 1)
        )
        return rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the rows [t * k, ...] of each token in float32, in the order of its groups: [t, ...]."""
        tokens: torch.Tensor = _Combine.apply(rows, self.tokens_N, self.rows_TK)  # type: ignore[no-untyped-call]
        return tokens


def _sum_rows(rows: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    selected = rows.index_select(0, rows_TK.flatten())
    if rows_TK.size(1) == 1:
        return selected
    wide = torch.promote_types(rows.dtype, torch.float32)
    return selected.view(*rows_TK.shape, *rows.shape[1:]).sum(1, dtype=wide).to(rows.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, tokens_N: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_TK)
        return tokens.index_select(0, tokens_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The derivative of torch's index_select adds with atomics, in the dtype of the gradient and in any order.
        (rows_TK,) = ctx.saved_tensors
        return _sum_rows(gradient, rows_TK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens_N: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens_N)
        return _sum_rows(rows, rows_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens_N,) = ctx.saved_tensors
        return gradient.index_select(0, tokens_N), None, None


def grouped_linear(tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Multiply each row by the transposed matrix of its group: [n, out].

    Arguments:
        tokens: [n, in], sorted by group.
        ends: int32 [groups], on the device of ``tokens``, the end of each group; the last is n.
        weights: [out, in] for each group; a group without tokens gets a gradient of zeros, even if all are empty.
    """
    product: torch.Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices of one shape as [groups, ...], a view of their memory; None if their distances are not equal."""
    first, second = weights[0], weights[min(1, len(weights) - 1)]
    start, storage = first.storage_offset(), first.untyped_storage()._cdata
    distance = second.storage_offset() - start
    for position, weight in enumerate(weights):
        if weight.storage_offset() != start + position * distance or weight.untyped_storage()._cdata != storage:
            return None
    if distance < first.numel() * (len(weights) > 1) or not first.is_contiguous():
        return None
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()), start)


def zero_empty_groups(gradients: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the gradients [groups, out, in] of groups without rows, whatever is there, NaN included."""
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return gradients.masked_fill_(is_empty.view(-1, 1, 1), 0)


def _leaves_empty_groups(device: torch.device) -> bool:
    """Return whether torch's kernel for ``device`` may leave anything as the gradients of groups without rows.

    It does on Blackwell (https://github.com/pytorch/pytorch/issues/172439); can go when that is closed.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the groups of ``a`` by those of ``b``, of which 2-D operands have rows or columns up to ``ends``."""
    if a.numel():
        return grouped_mm(a, b, offs=ends)
    # All groups are empty. torch's kernel refuses the strides of such operands.
    return a.new_zeros((len(a), b.size(2)) if b.dim() == 3 else (len(ends), len(a), b.size(1)))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        matrices = stacked(weights)
        ctx.num_weights, ctx.is_view = len(weights), matrices is not None
        if matrices is None:  # the copy is not kept for the backward pass
            ctx.save_for_backward(tokens, ends, *weights)
            matrices = torch.stack(weights)
        else:
            ctx.save_for_backward(tokens, ends, matrices)
        return _grouped_product(tokens, matrices.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()  # the gradient of a sum has strides of 0, which grouped_mm refuses
        of_tokens: torch.Tensor | None = None
        of_weights: tuple[torch.Tensor | None, ...] = (None,) * ctx.num_weights
        if ctx.needs_input_grad[0]:
            of_tokens = _grouped_product(gradient, weights[0] if ctx.is_view else torch.stack(weights), ends)
        if any(ctx.needs_input_grad[2:]):
            of_all = _grouped_product(gradient.t(), tokens, ends)
            if _leaves_empty_groups(of_all.device):
                zero_empty_groups(of_all, ends)
            of_weights = of_all.unbind()
        return of_tokens, None, *of_weights
