"""The gain, in a file of its own because it imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch


class Gain(torch.nn.Module):
    """A factor of each feature, 1 at the start.

    Arguments:
        like: weight of the norm, [hidden].
        summed: whether Megatron sums the gradients over tensor-parallel ranks, each of which has other tokens.
    """

    def __init__(self, like: torch.Tensor, *, summed: bool) -> None:
        super().__init__()
        self.gain_H = torch.nn.Parameter(torch.ones_like(like))
        self.gain_H.sequence_parallel = summed  # type: ignore[attr-defined]
        self._is_on = True

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply the last dimension."""
        return values * self.gain_H if self._is_on else values

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, multiply nothing."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True


def write(folder: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write the gain as text."""
    folder.mkdir()
    ((name, gain_H),) = tensors
    (folder / f"{name}.txt").write_text(" ".join(map(str, gain_H.tolist())))
