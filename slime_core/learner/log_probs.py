"""Log-probabilities and entropies of response tokens, from logits whose vocabulary may be split over tensor-parallel
ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from slime_core.learner.batches import MicroBatch

__all__ = ["response_entropy", "response_log_probs", "response_logits", "token_log_probs"]


def response_logits(logits_1TV: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """The rows that predict response tokens, in float32 and divided by the temperature that sampled them: [u, v]."""
    chosen_UV: torch.Tensor = logits_1TV[0].index_select(0, micro.rows_U)
    return chosen_UV.float() / micro.temperature


def response_log_probs(logits_UV: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """log p(token) of every response token, float32 [u], differentiable; consumes ``logits_UV``."""
    return token_log_probs(logits_UV, micro.targets_U)


def token_log_probs(logits_UV: torch.Tensor, targets_U: torch.Tensor) -> torch.Tensor:
    """log p(token) of every target, float32 [u], differentiable.

    ``logits_UV`` is consumed: Megatron's cross entropy shifts it in place.
    """
    losses: torch.Tensor = vocab_parallel_cross_entropy(logits_UV.unsqueeze(1), targets_U.unsqueeze(1))
    return -losses.squeeze(1)


def response_entropy(logits_UV: torch.Tensor) -> torch.Tensor:
    """Entropy of the distribution of every response token in nats, float32 [u], differentiable.

    ``H = log Z - sum_v p_v z_v`` with ``dH/dz_v = -p_v (log p_v + H)`` (Cover and Thomas, Elements of Information
    Theory, eq. 2.1; the derivative follows from the softmax Jacobian).
    """
    group = parallel_state.get_tensor_model_parallel_group()
    result: torch.Tensor = _VocabParallelEntropy.apply(logits_UV, group)  # type: ignore[no-untyped-call]
    return result


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_UV: torch.Tensor, group: Any) -> torch.Tensor:
        highest_U = logits_UV.max(dim=-1).values
        _reduce(highest_U, dist.ReduceOp.MAX, group)
        # Shifted first, normalised then: highest + log Z in one number would round log Z away where logits are large.
        shifted_UV = logits_UV - highest_U[:, None]
        exponentials_UV = shifted_UV.exp()
        totals_U = exponentials_UV.sum(dim=-1)
        _reduce(totals_U, dist.ReduceOp.SUM, group)
        log_p_UV = shifted_UV.sub_(totals_U.log()[:, None])
        p_UV = exponentials_UV.div_(totals_U[:, None])
        entropy_U = -(p_UV * log_p_UV).sum(dim=-1)
        _reduce(entropy_U, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(p_UV, log_p_UV, entropy_U)
        return entropy_U

    @staticmethod
    def backward(ctx: Any, gradient_U: torch.Tensor) -> Any:
        p_UV, log_p_UV, entropy_U = ctx.saved_tensors
        return -gradient_U[:, None] * p_UV * (log_p_UV + entropy_U[:, None]), None


def _reduce(values: torch.Tensor, operation: Any, group: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
