"""Estimates of KL(actor || base) from the tokens that the actor sampled, token by token.

Source: J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020); k3 as the penalty of GRPO:
DeepSeekMath (2402.03300), equation 4.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

__all__ = ["KlEstimator", "approximate_kl"]

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]

# One token whose probability collapsed would otherwise outweigh the whole batch.
_LOW_VAR_BOUND = 10.0


def approximate_kl(
    log_probs_T: torch.Tensor, *, base_log_probs_T: torch.Tensor, estimator: KlEstimator = "k3"
) -> torch.Tensor:
    """One estimate a token, [T]; exactly 0 where both log-probabilities are equal.

    With d = log_probs - base_log_probs: ``k1`` is d, unbiased, of either sign; ``k2`` is d^2 / 2, biased, never
    negative; ``k3`` is exp(-d) - 1 + d, unbiased and never negative; ``low_var_kl`` is k3 held to [-10, 10].

    Arguments:
        log_probs_T: float [T], of the actor; may carry the gradient.
        base_log_probs_T: float [T], of the model it is held against.

    Raises:
        ValueError: the shapes differ, or there is no such estimator.
    """
    if log_probs_T.shape != base_log_probs_T.shape:
        shapes = f"{tuple(log_probs_T.shape)} and {tuple(base_log_probs_T.shape)}"
        raise ValueError(f"log_probs_T and base_log_probs_T must have one shape; found {shapes}")
    difference_T = log_probs_T - base_log_probs_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator not in get_args(KlEstimator):
        raise ValueError(f"no KL estimator is called {estimator!r}; there are {', '.join(get_args(KlEstimator))}")
    # expm1 keeps the difference of two nearly equal models from drowning in the rounding of exp(-d) - 1.
    k3_T = torch.expm1(-difference_T) + difference_T
    return k3_T.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if estimator == "low_var_kl" else k3_T
