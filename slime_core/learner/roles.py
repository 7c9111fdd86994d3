"""Named sets of weights that take turns in one model: the actor that trains, and the reference it is held against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Roles"]

Weights = dict[str, torch.Tensor]


class Roles:
    """Keeps weight sets off the accelerator and swaps one into the model for the length of a ``with`` block.

    The model holds the actor at all other times. Buffers and optimizer state stay with the actor.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._sets: dict[str, Weights] = {}

    def remember(self, role: str) -> None:
        """Keep a copy of what the model holds now, under ``role``."""
        self._sets[role] = {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters()}

    def restore(self, role: str) -> None:
        """The model holds the weights of ``role`` from now on."""
        self._put(self._sets[role])

    def __contains__(self, role: str) -> bool:
        return role in self._sets

    @contextmanager
    def playing(self, role: str) -> Iterator[None]:
        """The model holds the weights of ``role`` inside the block, and what it held before after it."""
        before = {name: parameter.detach().clone() for name, parameter in self._parameters()}
        self._put(self._sets[role])
        try:
            yield
        finally:
            self._put(before)

    def _put(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters():
                parameter.copy_(weights[name])

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for position, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{position}.{name}", parameter
