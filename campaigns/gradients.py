"""Gradients under Hugging Face names, to compare layouts and to look into a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["named_gradients"]


def named_gradients(spec: Any, model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The gradient of every weight of the whole model, gathered over all ranks, under the weight's Hugging Face name.

    Gradients take the parameters' places for the length of an export, so that names, splits and gathering are those of
    the weights. Collective. Valid between ``forward_backward_policy`` and the optimizer's step, which
    still finds what it needs.

    Arguments:
        spec: the model spec that built the chunks.
        model: the chunks in Megatron's DDP (:func:`slime_core.learner.optimizer.wrap`).

    Returns:
        Copies in the dtype of the parameters, the same on every rank.
    """
    complete(model)
    with _in_place_of_weights(model):
        return {name: gradient.clone() for name, gradient in spec.export_weights([_inner(chunk) for chunk in model])}


def complete(model: Sequence[Any]) -> None:
    """Gather the gradient shards of all ranks: the distributed optimizer reduces to each rank only its own shard."""
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.view(group.size(), -1))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)


@contextmanager
def _in_place_of_weights(model: Sequence[Any]) -> Iterator[None]:
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = _gradient(parameter)
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def _gradient(parameter: Any) -> torch.Tensor:
    # A frozen parameter has no place in Megatron's buffers.
    found: torch.Tensor = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
    return found.to(parameter.dtype)


def _inner(chunk: Any) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)
