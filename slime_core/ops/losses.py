"""Losses and divergences, token by token: PPO's clipped surrogate, KL estimators, and the loss of a critic.

Left out: the mean over tokens, because the core aggregates. From PPO (1707.06347), equation 9: the entropy and value
terms, which are separate losses, and the weight of the value loss, because a critic has a separate optimizer.

KL(actor || base) is estimated from the tokens that the actor sampled. Sources: J. Schulman, "Approximating KL
Divergence" (joschu.net/blog/kl-approx.html, 2020); k3 as the penalty of GRPO: DeepSeekMath (2402.03300), equation 4;
weighed by the importance ratio: DeepSeek-V3.2 (2512.02556), equation 7.

Effect of the weight. Tokens x are sampled from mu, and the actor is pi. An estimate k(x) whose mean under pi is the
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

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

__all__ = [
    "LARGEST_LOG_RATIO",
    "KlEstimator",
    "Surrogate",
    "ValueLoss",
    "approximate_kl",
    "check_clip",
    "clipped_surrogate",
    "clipped_value_loss",
]


LARGEST_LOG_RATIO = 20.0
"""Largest log-ratio, in nats; a larger one is clamped to it and passes no gradient. The exponential overflows from 88.7
on, and an infinite ratio times an advantage or a gradient of 0 is NaN."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The surrogate loss and its clips, each [T].

    Arguments:
        loss_T: to be minimised; carries the gradient.
        ratio_T: importance ratio, no gradient.
        clipped_T: 1.0 if the ratio's clip decided the loss, else 0.0.
        dual_clipped_T: 1.0 if the dual clip decided it.
    """

    loss_T: torch.Tensor
    ratio_T: torch.Tensor
    clipped_T: torch.Tensor
    dual_clipped_T: torch.Tensor

    def metrics(self, log_ratio_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the metrics of a policy loss, [T]; ``ppo_kl`` is the k1 estimate of the policy's change."""
        return {
            "ratio": self.ratio_T,
            "clip_fraction": self.clipped_T,
            "dual_clip_fraction": self.dual_clipped_T,
            "ppo_kl": -log_ratio_T.detach(),
        }


def clipped_surrogate(
    log_ratio_T: torch.Tensor,
    *,
    advantages_T: torch.Tensor,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> Surrogate:
    """Compute the pessimistic surrogate: no token gains from moving its ratio beyond the clip range.

    ``max(-ratio * A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)``, and for A < 0 at most ``-eps_clip_c * A``.

    Arguments:
        log_ratio_T: float [T], log-probability under the actor minus that under the old actor; carries the gradient.
        advantages_T: float [T], no gradient.
        eps_clip: lower clip range, from 0 to 1: the ratio is clipped to at least 1 - eps_clip.
        eps_clip_high: upper clip range, at least 0; ``eps_clip`` if None.
        eps_clip_c: bound of the ratio for negative advantages (dual clip), above 1; None for no bound.

    Raises:
        ValueError: the shapes differ, or a bound is out of range.

    The log-ratio is clamped to :data:`LARGEST_LOG_RATIO`.

    Sources: Schulman et al. 2017 (1707.06347), equation 7; clip-higher: DAPO (2503.14476), section 3.1; dual clip: Ye
    et al. 2019 (1912.09729), the dual-clip PPO objective.
    """
    low, high = check_clip(eps_clip, eps_clip_high)
    _check(log_ratio_T, advantages_T, dual=eps_clip_c)
    ratio_T = log_ratio_T.clamp(max=LARGEST_LOG_RATIO).exp()
    free_T = -ratio_T * advantages_T
    held_T = -ratio_T.clamp(1.0 - low, 1.0 + high) * advantages_T
    loss_T = torch.maximum(free_T, held_T)
    clipped_T = held_T > free_T
    dual_T = torch.zeros_like(clipped_T)
    if eps_clip_c is not None:
        bound_T = -eps_clip_c * advantages_T
        dual_T = (advantages_T < 0) & (bound_T < loss_T)
        loss_T = torch.where(dual_T, bound_T, loss_T)
    return Surrogate(loss_T, ratio_T.detach(), (clipped_T & ~dual_T).to(ratio_T.dtype), dual_T.to(ratio_T.dtype))


def check_clip(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    """Return the clip range below and above 1; the upper one is the lower one if it is None.

    Raises:
        ValueError: a bound is out of range.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    if not 0.0 <= eps_clip <= 1.0:
        raise ValueError(f"eps_clip is {eps_clip}; a lower bound of the ratio needs 0 <= eps_clip <= 1")
    if not 0.0 <= high < math.inf:
        raise ValueError(f"eps_clip_high is {high}; an upper bound of the ratio needs eps_clip_high >= 0")
    return eps_clip, high


def _check(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, dual: float | None) -> None:
    if log_ratio_T.shape != advantages_T.shape:
        shapes = f"{tuple(log_ratio_T.shape)} and {tuple(advantages_T.shape)}"
        raise ValueError(f"log_ratio_T and advantages_T must have one shape; found {shapes}")
    if dual is not None and not dual > 1.0:
        raise ValueError(f"eps_clip_c is {dual}; the dual clip needs a bound above 1, or None to leave it out")


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
    """Estimate the KL divergence at each token, [T]; exactly 0 if both log-probabilities are equal.

    With d = log_probs - base_log_probs: ``k1`` is d, unbiased, of either sign; ``k2`` is d^2 / 2, biased, never
    negative; ``k3`` is exp(-d) - 1 + d, unbiased and never negative; ``low_var_kl`` is k3 clamped to [-10, 10]. An
    estimate is weighted before it is clamped, and a clamped estimate passes no gradient. For k3 and
    low_var_kl, d below -:data:`~slime_core.ops.losses.LARGEST_LOG_RATIO` counts as that bound and passes no gradient,
    because float32 does not hold exp(-d) from 89 on.

    Arguments:
        log_probs_T: float [T], of the actor; may carry the gradient.
        base_log_probs_T: float [T], of the model from which the divergence is measured.
        sampled_log_probs_T: float [T], of the policy that sampled the tokens, no gradient: every estimate is multiplied
            by w = exp(log_probs - sampled_log_probs), which passes a gradient; its logarithm is clamped to
            :data:`~slime_core.ops.losses.LARGEST_LOG_RATIO`. None: the actor sampled them, and no estimate is weighted.

    Raises:
        ValueError: the shapes differ, or there is no such estimator.
    """
    for name, column_T in {"base_log_probs_T": base_log_probs_T, "sampled_log_probs_T": sampled_log_probs_T}.items():
        if column_T is not None and log_probs_T.shape != column_T.shape:
            shapes = f"{tuple(log_probs_T.shape)} and {tuple(column_T.shape)}"
            raise ValueError(f"log_probs_T and {name} must have one shape; found {shapes}")
    estimate_T = _weighted(log_probs_T, base_log_probs_T, sampled_log_probs_T, estimator)
    return estimate_T.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if estimator == "low_var_kl" else estimate_T


def _weighted(
    log_probs_T: torch.Tensor, base_T: torch.Tensor, sampled_T: torch.Tensor | None, estimator: KlEstimator
) -> torch.Tensor:
    if sampled_T is None:
        return _estimate(log_probs_T - base_T, estimator)
    if estimator in ("k3", "low_var_kl"):
        k3_T: torch.Tensor = _WeighedK3.apply(log_probs_T, base_T, sampled_T)  # type: ignore[no-untyped-call]
        return k3_T
    return _weight(log_probs_T, sampled_T) * _estimate(log_probs_T - base_T, estimator)


def _weight(log_probs_T: torch.Tensor, sampled_T: torch.Tensor) -> torch.Tensor:
    return (log_probs_T - sampled_T).clamp(max=LARGEST_LOG_RATIO).exp()


class _WeighedK3(torch.autograd.Function):
    """Computes w k3, with the gradient w d; autograd would subtract two numbers as large as exp(-d)."""

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
    # A later clamp of an infinite value would give a gradient of 0 x inf.
    held_T = difference_T.clamp(min=-LARGEST_LOG_RATIO)
    # expm1 keeps the difference of two nearly equal models from drowning in the rounding of exp(-d) - 1.
    return torch.expm1(-held_T) + held_T


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss and its clip, each [T].

    Arguments:
        loss_T: to be minimised; carries the gradient.
        clipped_T: 1.0 if the clipped value decided the loss, so that the token passes no gradient, else 0.0. A value
            within the range counts 0, however it was rounded.
    """

    loss_T: torch.Tensor
    clipped_T: torch.Tensor


def clipped_value_loss(
    values_T: torch.Tensor, *, old_values_T: torch.Tensor, returns_T: torch.Tensor, value_clip: float | None
) -> ValueLoss:
    """``max((V - R)^2, (clamp(V, V_old - value_clip, V_old + value_clip) - R)^2)``: a squared error without a half.

    A value that has moved towards its return by more than ``value_clip`` since the rollout gains nothing more; one that
    has moved away is still pulled back.

    Sources: the squared error, without a half: Schulman et al. 2017 (1707.06347), equation 9. The clip is not in the
    paper but in the baseline of its authors (openai/baselines, ppo2/model.py), which has a half. slime has none either.

    Arguments:
        values_T: float [T], of the critic that trains; carries the gradient.
        old_values_T: float [T], of the critic before the first optimizer step of the rollout.
        returns_T: float [T], targets of the values.
        value_clip: above 0, in the unit of the values; None for no clip.

    Raises:
        ValueError: the shapes differ, or ``value_clip`` is not above 0.
    """
    if not values_T.shape == old_values_T.shape == returns_T.shape:
        shapes = f"{tuple(values_T.shape)}, {tuple(old_values_T.shape)} and {tuple(returns_T.shape)}"
        raise ValueError(f"values_T, old_values_T and returns_T must have one shape; found {shapes}")
    free_T = (values_T - returns_T).square()
    if value_clip is None:
        return ValueLoss(free_T, torch.zeros_like(free_T.detach()))
    if not value_clip > 0.0:
        raise ValueError(f"value_clip is {value_clip}; a bound of the values needs to be above 0, or None for no clip")
    # The value itself is clamped, so that one inside the range keeps its bits. Added to the old value, its clamped
    # difference would come back rounded, and chance would decide which of the two losses is larger.
    held_T = (values_T.clamp(old_values_T - value_clip, old_values_T + value_clip) - returns_T).square()
    # Where both are equal, as at the first step everywhere, the free one decides: it has the whole gradient.
    clipped_T = held_T > free_T
    return ValueLoss(torch.where(clipped_T, held_T, free_T), clipped_T.to(free_T.dtype))
