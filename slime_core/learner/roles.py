"""Named sets of weights that take turns in one model.

    actor       trains; the model holds it whenever nobody else plays
    reference   what the actor is held against; the start weights, or a copy of the actor that is refreshed
    old_actor   a copy of the actor as the engines serve it
    teacher     what the actor is distilled from

One rule between them: only the actor changes by training. A set changes when it is remembered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["ACTOR", "OLD_ACTOR", "REFERENCE", "TEACHER", "Roles"]

ACTOR, REFERENCE, OLD_ACTOR, TEACHER = "actor", "reference", "old_actor", "teacher"

Weights = dict[str, torch.Tensor]


class Roles:
    """Keeps weight sets in host memory and swaps one into the model for the length of a ``with`` block.

    While a role plays, its place in host memory holds the actor: a swap needs no more device memory than the largest
    parameter. Buffers and optimizer state stay with the actor.

    Arguments:
        chunks: hold the actor; parameters keep their storage.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._sets: dict[str, Weights] = {}

    def remember(self, role: str) -> None:
        """Keep a copy of what the model holds now, under ``role``."""
        kept = self._sets.get(role) or {name: _in_host_memory(parameter) for name, parameter in self._parameters()}
        with torch.no_grad():
            for name, parameter in self._parameters():
                kept[name].copy_(parameter)
        self._sets[role] = kept

    def read(self, role: str, load: Callable[[], None]) -> None:
        """Keep what ``load`` puts into the model, under ``role``; the model holds the same as before afterwards.

        Whatever ``load`` raises, the actor is back, and ``role`` is what it was.
        """
        self.remember(ACTOR)
        try:
            load()
            self.remember(role)
        finally:
            self._swap(ACTOR)
            del self._sets[ACTOR]

    def __contains__(self, role: str) -> bool:
        return role in self._sets

    @contextmanager
    def playing(self, role: str) -> Iterator[None]:
        """The model holds the weights of ``role`` inside the block, and the actor's, to the bit, after it."""
        if role == ACTOR:
            yield
            return
        self._swap(role)
        try:
            yield
        finally:
            self._swap(role)

    def _swap(self, role: str) -> None:
        kept = self._sets[role]
        with torch.no_grad():
            for name, parameter in self._parameters():
                held = parameter.detach().clone()
                parameter.copy_(kept[name])
                kept[name].copy_(held)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for position, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{position}.{name}", parameter


def _in_host_memory(parameter: torch.Tensor) -> torch.Tensor:
    # Pinned, so that a swap is as fast as the bus; without a GPU there is nothing to pin for.
    return torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
