"""Whitened advantages, in torch: mean 0 and variance 1 over the trained tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["whitened"]


EPS = 1e-8
"""Under the square root, in the square of the advantages' unit: a rollout without any difference gives 0."""


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


def whitened(
    values_T: torch.Tensor, *, mask_T: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] = _alone
) -> torch.Tensor:
    """Return (value - mean) / sqrt(variance + 1e-8) over all ranks' trained tokens, float32 [T]; 0 where masked.

    The variance divides by the number of tokens, so the result has a variance of 1 except for the 1e-8. Both sums are
    in float64, the mean first, so neither a large mean nor the split over ranks costs digits; the order, packing and
    distribution of tokens over ranks change the result by rounding only.

    Arguments:
        values_T: float [T]; masked ones may hold anything.
        mask_T: float [T], 0 at tokens that are not trained.
        total: sums a float64 tensor over the ranks that hold other tokens; called twice on every rank, even on one
            without tokens. The default is for a single rank.

    Raises:
        ValueError: the shapes differ.

    Source: Andrychowicz et al. 2020 (2006.05990), "What Matters In On-Policy Reinforcement Learning?", per-batch
    advantage normalisation (choice C67); here over the rollout, not over a micro-batch.
    """
    if values_T.shape != mask_T.shape:
        shapes = f"{tuple(values_T.shape)} and {tuple(mask_T.shape)}"
        raise ValueError(f"values_T and mask_T must have one shape; found {shapes}")
    trained_T = mask_T != 0
    known_T = values_T.double().where(trained_T, 0.0)
    summed, count = total(torch.stack([known_T.sum(), trained_T.sum().double()])).unbind()
    shifted_T = (known_T - summed / count.clamp(min=1)).where(trained_T, 0.0)
    variance = total(shifted_T.square().sum()) / count.clamp(min=1)
    return (shifted_T / (variance + EPS).sqrt()).float()
