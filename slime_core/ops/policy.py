"""The clipped surrogate of PPO, token by token.

Left out: the mean over tokens (the core aggregates), and the entropy and value terms of the paper's equation 9, which
are losses of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["LARGEST_LOG_RATIO", "Surrogate", "check_clip", "clipped_surrogate"]

LARGEST_LOG_RATIO = 20.0
"""In nats; a log-ratio above it is held there, and passes no gradient. The exponential overflows from 88.7 on, and an
infinite ratio times an advantage or a gradient of 0 is NaN."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The surrogate loss and what it did, each [T].

    Arguments:
        loss_T: to be minimised; carries the gradient.
        ratio_T: importance ratio, no gradient.
        clipped_T: 1.0 where the ratio's clip decided the loss, else 0.0.
        dual_clipped_T: 1.0 where the dual clip decided it.
    """

    loss_T: torch.Tensor
    ratio_T: torch.Tensor
    clipped_T: torch.Tensor
    dual_clipped_T: torch.Tensor

    def metrics(self, log_ratio_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a policy loss reports of each token, [T]; ``ppo_kl`` is the k1 estimate of the actor's way."""
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
    """The pessimistic surrogate: no token gains from moving its ratio beyond the clip range.

    ``max(-ratio * A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high) * A)``, and for A < 0 at most ``-eps_clip_c * A``.

    Arguments:
        log_ratio_T: float [T], log-probability under the actor minus that under the old actor; carries the gradient.
        advantages_T: float [T], no gradient.
        eps_clip: how far below 1 the ratio counts, from 0 to 1.
        eps_clip_high: how far above 1, at least 0; None: ``eps_clip``.
        eps_clip_c: bound of the ratio for negative advantages, above 1; None: no bound.

    Raises:
        ValueError: the shapes differ, or a bound is out of range.

    The log-ratio is held at :data:`LARGEST_LOG_RATIO`.

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
    """How far below and above 1 the ratio may count; the second is the first where it is None.

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
