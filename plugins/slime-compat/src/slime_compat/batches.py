"""Micro-batches in slime's format: one tensor per sample instead of one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_compat.calling import PathFunction
from slime_core.errors import PluginError
from slime_core.provisional import MicroBatch

__all__ = ["joined", "refuse_no_gradient", "refuse_wider_mask", "response_lengths", "split", "total_lengths"]


def total_lengths(micro: MicroBatch) -> list[int]:
    """Return the number of prompt and response tokens of each sample."""
    return micro.lengths


def response_lengths(micro: MicroBatch) -> list[int]:
    """Return the number of response tokens of each sample."""
    lengths: list[int] = torch.bincount(micro.samples_U, minlength=micro.num_samples).tolist()
    return lengths


def split(values_U: torch.Tensor, micro: MicroBatch) -> list[torch.Tensor]:
    """Split the tokens' values into one tensor per sample."""
    return list(values_U.split(response_lengths(micro)))


def joined(
    function: PathFunction, name: str, values: Any, like_U: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Convert ``values``, which a function returned as ``name``, to one number per token, like ``like_U``.

    Arguments:
        values: one tensor per sample, or one tensor of all samples.
        like_U: its device and dtype are those of the result.
        lengths: number of tokens of each sample.

    Raises:
        PluginError: the values are not one number per token.
    """
    if isinstance(values, torch.Tensor):
        values = list(values.split(list(lengths))) if values.shape == like_U.shape else [values]
    parts = _tensors(function, name, values)
    shapes = [tuple(part.shape) for part in parts]
    if shapes != [(length,) for length in lengths]:
        raise PluginError(
            f"{function}: {name} has the shapes {_short(shapes)}; accepted: one tensor per sample, with one number per "
            f"response token: {_short([(length,) for length in lengths])}."
        )
    return torch.cat([part.to(device=like_U.device, dtype=like_U.dtype) for part in parts]) if parts else like_U[:0]


def _tensors(function: PathFunction, name: str, values: Any) -> list[torch.Tensor]:
    try:
        return [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(values).__name__
        raise PluginError(f"{function}: {name} is a {kind}; accepted: one tensor per sample ({error}).") from error


def _short(shapes: Sequence[Any], *, most: int = 4) -> str:
    return f"{', '.join(map(str, shapes[:most]))}{', ...' if len(shapes) > most else ''}" or "none"


def refuse_wider_mask(function: PathFunction, mask_U: torch.Tensor, before_U: torch.Tensor) -> None:
    """Raise unless ``mask_U`` is 0 or 1 and trains only tokens that were trained before.

    The divisors in the loss weights were counted with the old mask; more tokens would get a wrong weight.
    """
    if not bool(((mask_U == 0) | (mask_U == 1)).all()):
        raise PluginError(
            f"{function}: a loss mask holds something else than 0 and 1; to weigh tokens, change the loss."
        )
    wider = int(((mask_U != 0) & (before_U == 0)).sum())
    if wider:
        raise PluginError(
            f"{function}: its loss masks train {wider} tokens that were masked; accepted: masks that leave more out."
        )


def refuse_no_gradient(function: PathFunction, loss: Any) -> torch.Tensor:
    """Return ``loss`` if it is one number with a gradient.

    Raises:
        PluginError: it is not.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    kind = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        kind = f"shape {tuple(loss.shape)}, {'with' if loss.requires_grad else 'without'} a gradient"
    raise PluginError(f"{function}: the loss is {kind}; accepted: a tensor of one number with a gradient.")
