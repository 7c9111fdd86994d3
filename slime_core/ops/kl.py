"""Estimates of KL(actor || base) from the tokens that the actor sampled, token by token.

Sources: J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020); k3 as the penalty of GRPO:
DeepSeekMath (2402.03300), equation 4; weighed by the importance ratio: DeepSeek-V3.2 (2512.02556), equation 7.

What the weight does. Tokens x are sampled from mu, and the actor is pi. An estimate k(x) whose mean under pi is the
divergence has, weighed by pi(x) / mu(x), that mean under mu, whatever pi is; so the mean of its gradient is the
gradient of the divergence. That takes the gradient of the weight too: where mu equals pi the weight is 1, and still

    d/dpi  E_mu[(pi / mu) k]  =  E_mu[(pi / mu) (k dlog(pi) + dk)]

Without the weight only the second term is left. It is 0 on average for k1, and for k3 it is the gradient of the other
divergence, KL(base || actor). k2's mean is not the divergence, so weighing it does not help.

With w = pi(x) / mu(x) and d = log(pi) - log(base), the gradient of weighed k3 by log(pi) is

    w k3 + w (1 - exp(-d))  =  w (exp(-d) - 1 + d + 1 - exp(-d))  =  w d

so it is computed as w d: in float32 the two exponentials cancel to noise from d = -18 on.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from slime_core.ops.policy import LARGEST_LOG_RATIO

__all__ = ["KlEstimator", "approximate_kl"]

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

# One token whose probability collapsed would otherwise outweigh the whole batch.
_LOW_VAR_BOUND = 10.0


def approximate_kl(
    log_probs_T: torch.Tensor,
    *,
    base_log_probs_T: torch.Tensor,
    estimator: KlEstimator = "k3",
    sampled_log_probs_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """One estimate a token, [T]; exactly 0 where both log-probabilities are equal.

    With d = log_probs - base_log_probs: ``k1`` is d, unbiased, of either sign; ``k2`` is d^2 / 2, biased, never
    negative; ``k3`` is exp(-d) - 1 + d, unbiased and never negative; ``low_var_kl`` is k3 held to [-10, 10]. The weight
    comes first, then this hold: what is held is the weighed estimate, and beyond 10 it passes no gradient. For k3 and
    low_var_kl, d below -:data:`~slime_core.ops.policy.LARGEST_LOG_RATIO` counts as that bound and passes no gradient,
    because float32 does not hold exp(-d) from 89 on.

    Arguments:
        log_probs_T: float [T], of the actor; may carry the gradient.
        base_log_probs_T: float [T], of the model it is held against.
        sampled_log_probs_T: float [T], of the policy that sampled the tokens, no gradient: every estimate is weighed by
            w = exp(log_probs - sampled_log_probs), which passes a gradient, its logarithm held at
            :data:`~slime_core.ops.policy.LARGEST_LOG_RATIO`. None: the actor sampled them, and no estimate is weighted.

    Raises:
        ValueError: the shapes differ, or there is no such estimator.
    """
    for name, column_T in {"base_log_probs_T": base_log_probs_T, "sampled_log_probs_T": sampled_log_probs_T}.items():
        if column_T is not None and log_probs_T.shape != column_T.shape:
            shapes = f"{tuple(log_probs_T.shape)} and {tuple(column_T.shape)}"
            raise ValueError(f"log_probs_T and {name} must have one shape; found {shapes}")
    estimate_T = _weighed(log_probs_T, base_log_probs_T, sampled_log_probs_T, estimator)
    return estimate_T.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if estimator == "low_var_kl" else estimate_T


def _weighed(
    log_probs_T: torch.Tensor, base_T: torch.Tensor, sampled_T: torch.Tensor | None, estimator: KlEstimator
) -> torch.Tensor:
    if sampled_T is None:
        return _estimate(log_probs_T - base_T, estimator)
    if estimator in ("k3", "low_var_kl"):
        found_T: torch.Tensor = _WeighedK3.apply(log_probs_T, base_T, sampled_T)  # type: ignore[no-untyped-call]
        return found_T
    return _weight(log_probs_T, sampled_T) * _estimate(log_probs_T - base_T, estimator)


def _weight(log_probs_T: torch.Tensor, sampled_T: torch.Tensor) -> torch.Tensor:
    return (log_probs_T - sampled_T).clamp(max=LARGEST_LOG_RATIO).exp()


class _WeighedK3(torch.autograd.Function):
    """w k3 with the gradient w d by the actor's log-probabilities, which autograd would find as the difference of two
    numbers as large as exp(-d)."""

    @staticmethod
    def forward(ctx: Any, log_probs_T: torch.Tensor, base_T: torch.Tensor, sampled_T: torch.Tensor) -> torch.Tensor:
        weight_T, difference_T = _weight(log_probs_T, sampled_T), log_probs_T - base_T
        # An infinite slope would make NaN of a masked token's gradient, 0 x inf.
        finite_T = difference_T.where(difference_T.isfinite(), difference_T.clamp(min=-LARGEST_LOG_RATIO))
        ctx.save_for_backward(weight_T * finite_T)
        return weight_T * _estimate(difference_T, "k3")

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_T,) = ctx.saved_tensors
        return slopes[0] * gradient_T, None, None


def _estimate(difference_T: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator not in get_args(KlEstimator):
        raise ValueError(f"no KL estimator is called {estimator!r}; there are {', '.join(get_args(KlEstimator))}")
    # Of an infinite value, a later hold would make a gradient of 0 x inf.
    held_T = difference_T.clamp(min=-LARGEST_LOG_RATIO)
    # expm1 keeps the difference of two nearly equal models from drowning in the rounding of exp(-d) - 1.
    return torch.expm1(-held_T) + held_T
