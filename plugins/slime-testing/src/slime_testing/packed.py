"""Packed response tokens for examples: sequences of any length, concatenated, with some tokens masked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from hypothesis import strategies as st

from slime_core import EngineColumn
from slime_testing.suite import require

__all__ = [
    "EMPTY",
    "Packing",
    "SequenceSums",
    "require_column",
    "require_equal",
    "require_unchanged",
    "rows",
]


@dataclass(frozen=True, slots=True)
class Packing:
    """Lengths of sequences and mask of their tokens; ``seed`` determines the values of the columns.

    Example: ``Packing((2, 3), (1, 0, 1, 1, 1), 7)``: two sequences; the second token of the first is masked.

    Arguments:
        parts: packings whose columns are concatenated; empty if ``seed`` determines the whole columns.
    """

    lengths: tuple[int, ...]
    mask: tuple[int, ...]
    seed: int
    parts: tuple[Packing, ...] = ()

    def followed_by(self, others: Packing) -> Packing:
        """Return the sequences of this packing, with the same values, and then those of ``others``, with new values."""
        others = replace(others, seed=self.seed + 1000)
        return Packing(self.lengths + others.lengths, self.mask + others.mask, self.seed, (self, others))

    @property
    def mask_T(self) -> torch.Tensor:
        """The mask, float32 [T]."""
        return torch.tensor(self.mask, dtype=torch.float32)

    @property
    def segments(self) -> SequenceSums:
        """The sums over the sequences."""
        return SequenceSums(self.lengths)

    def uniform(self, number: int, *, low: float, high: float) -> torch.Tensor:
        """Return a random column, float32 [T] between the bounds; each ``number`` gives another column."""
        if self.parts:
            return torch.cat([part.uniform(number, low=low, high=high) for part in self.parts])
        generator = torch.Generator().manual_seed(self.seed * 101 + number)
        return torch.empty(len(self.mask)).uniform_(low, high, generator=generator)

    def engine_columns(self, reads_engine: Mapping[str, EngineColumn]) -> dict[str, torch.Tensor]:
        """Return random data of the engine, name -> float32 [T, width], between -8 and 0 as log-probabilities are."""
        numbers = count(FIRST_ENGINE_COLUMN)
        return {
            name: torch.stack([self.uniform(next(numbers), low=-8.0, high=0.0) for _ in range(column.width)], dim=-1)
            for name, column in reads_engine.items()
        }


FIRST_ENGINE_COLUMN = 100
"""Number of the first random column of the engine; the suites number their other columns from 0."""

EMPTY = (Packing((), (), 0), Packing((0,), (), 0), Packing((0, 0), (), 0))
"""Packings without tokens, as on a context-parallel rank that has only prompts of its sequences."""


class SequenceSums:
    """The ``Segments`` of concatenated sequences."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = torch.tensor(tuple(lengths), dtype=torch.int64)
        self._samples_T = torch.repeat_interleave(torch.arange(len(self._lengths)), self._lengths)

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sequence, [b]; differentiable."""
        zeros: torch.Tensor = values_T.new_zeros(len(self._lengths))
        return zeros.index_add(0, self._samples_T, values_T)

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        """Return each sequence's value at each of its tokens, [T]; differentiable."""
        return values_b.index_select(0, self._samples_T)


@st.composite
def rows(draw: Any, *, some_masked: bool = False) -> Packing:
    """Generate one to four sequences of one to six tokens;
    at least one token is trained, and with ``some_masked`` at least one is masked."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=2 if some_masked else 1, max_size=4))
    tokens = sum(lengths)
    mask = draw(st.lists(st.sampled_from([1, 1, 0]), min_size=tokens, max_size=tokens))
    mask[-1] = 1
    if some_masked:
        mask[0] = 0
    return Packing(tuple(lengths), tuple(mask), draw(st.integers(0, 999)))


def require_column(what: str, values_T: Any, like_T: torch.Tensor) -> None:
    """Check that ``values_T`` has one number per token."""
    kind = f"{type(values_T).__name__} of shape {tuple(getattr(values_T, 'shape', ()))}"
    shaped = isinstance(values_T, torch.Tensor) and values_T.shape == like_T.shape
    require(shaped, f"{what} is a {kind} for {len(like_T)} tokens; one number per token is wanted, never an average")


def require_unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Check that no tensor was changed in place."""
    changed = [name for name, old in before.items() if not _same(old, after[name])]
    require(not changed, f"the input was changed in place: {', '.join(changed)}. Work on a copy.")


def require_equal(found_T: torch.Tensor, wanted_T: torch.Tensor, otherwise: str) -> None:
    """Check that both columns are equal up to the rounding of float32."""
    close = torch.allclose(found_T, wanted_T, rtol=1e-4, atol=1e-5, equal_nan=True)
    require(close, f"{otherwise}\nFound {found_T.tolist()}, wanted {wanted_T.tolist()}.")


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.shape == after.shape and bool(torch.allclose(before, after, rtol=0, atol=0, equal_nan=True))
