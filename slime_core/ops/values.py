"""The loss of a critic, token by token.

Left out: the mean over tokens (the core aggregates), and the weight of the loss, which a critic with an optimizer of
its own has no use for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ValueLoss", "clipped_value_loss"]


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss and what the clip did, each [T].

    Arguments:
        loss_T: to be minimised; carries the gradient.
        clipped_T: 1.0 where the clipped value decided the loss, so that the token passes no gradient, else 0.0.
    """

    loss_T: torch.Tensor
    clipped_T: torch.Tensor


def clipped_value_loss(
    values_T: torch.Tensor, *, old_values_T: torch.Tensor, returns_T: torch.Tensor, value_clip: float | None
) -> ValueLoss:
    """``max((V - R)^2, (V_old + clamp(V - V_old, -value_clip, value_clip) - R)^2)``: a squared error without a half.

    A value that has moved towards its return by more than ``value_clip`` since the rollout gains nothing more; one that
    has moved away is still pulled back.

    Sources: the squared error, without a half: Schulman et al. 2017 (1707.06347), equation 9. The clip is not in the
    paper but in the baseline of its authors (openai/baselines, ppo2/model.py), which has a half. slime has none either.

    Arguments:
        values_T: float [T], of the critic that trains; carries the gradient.
        old_values_T: float [T], of the critic before the first optimizer step of the rollout.
        returns_T: float [T], what the values should be.
        value_clip: above 0, in the unit of the values; None: no clip.

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
    held_T = (old_values_T + (values_T - old_values_T).clamp(-value_clip, value_clip) - returns_T).square()
    # Where both are equal, at the first step everywhere, the free one decides: it has the whole gradient.
    clipped_T = held_T > free_T
    return ValueLoss(torch.where(clipped_T, held_T, free_T), clipped_T.to(free_T.dtype))
