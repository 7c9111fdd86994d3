"""Which samples have the same prompt, and how they are kept together, so that it stands once in a packed row.

Plain Python over lengths, as :mod:`slime_core.ops.packing`, which places *pieces* here: samples of one prompt that
share a micro-batch, taken for one long sample of the prompt and all their responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_core.ops.packing import balance, pack

__all__ = ["LEAST_SAVED", "Prompts", "same_prompts"]

LEAST_SAVED = 0.05
"""Part of a rollout's tokens that shared prompts have to save; with less, the time of a step stays the same."""

Piece = tuple[int, ...]


def same_prompts(prompts: Sequence[NDArray[np.int64]]) -> list[list[int]]:
    """Positions in ``prompts`` of those that are equal token by token, in the order of the first of each.

    Example: the prompts ``5 14``, ``20``, ``5 14`` and ``5`` give ``[[0, 2], [1], [3]]``.
    """
    found: dict[bytes, list[int]] = {}
    for position, prompt in enumerate(prompts):
        found.setdefault(np.ascontiguousarray(prompt, np.int64).tobytes(), []).append(position)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Prompts:
    """Lengths of b samples and which of them share a prompt.

    Example: the responses of 2 and 3 tokens to one prompt of 10 make ``lengths = [12, 13]``, ``prompts = [10, 10]`` and
    ``groups = [0, 0]``; together they take 15 tokens.

    Arguments:
        lengths: tokens of each sample.
        prompts: of them, tokens of its prompt.
        groups: number of its prompt; equal numbers are equal tokens.
    """

    lengths: Sequence[int]
    prompts: Sequence[int]
    groups: Sequence[int]

    @classmethod
    def of(cls, samples: Sequence[NDArray[np.int64]], prompts: Sequence[int]) -> Prompts:
        """From token ids: ``samples`` start with their prompts, whose lengths are ``prompts``."""
        groups = np.zeros(len(samples), np.int64)
        same = same_prompts([sample[:length] for sample, length in zip(samples, prompts, strict=True)])
        for number, members in enumerate(same):
            groups[members] = number
        return cls([len(sample) for sample in samples], prompts, groups.tolist())

    @property
    def saved(self) -> float:
        """Part of all tokens that would not be there if every prompt stood once."""
        once = sum(self.tokens(members) for members in self._together(range(len(self.lengths))))
        return 1 - once / max(sum(self.lengths), 1)

    def tokens(self, piece: Sequence[int]) -> int:
        """Of samples with one prompt, in one row."""
        return self.prompts[piece[0]] + sum(self.lengths[i] - self.prompts[i] for i in piece)

    def plan(self, samples: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
        """The micro-batches of each rank: every sample once, prompts kept whole where that loses no time.

        Of whole prompts, halves, quarters and so on, that cut is taken whose heaviest rank has the fewest tokens. A
        micro-batch has at most ``max_tokens``, a prompt counted once for all its samples; a longer sample runs alone.

        Raises:
            ValueError: ``max_tokens`` is not positive.
        """
        whole = [piece for members in self._together(samples) for piece in self._within(members, max_tokens)]
        cuts = [cut for cut in _cuts(whole) if len(cut) >= min(num_ranks, len(samples))]
        spread = [self._spread(cut, num_ranks) for cut in cuts[: None if num_ranks > 1 else 1]]
        best = min(spread, key=lambda ranks: max(sum(map(self.tokens, pieces)) for pieces in ranks))
        return [self._packed(pieces, max_tokens) for pieces in best]

    def _together(self, samples: Sequence[int]) -> list[Piece]:
        found: dict[int, list[int]] = {}
        for sample in samples:
            found.setdefault(self.groups[sample], []).append(sample)
        return [tuple(members) for members in found.values()]

    def _within(self, members: Piece, max_tokens: int) -> list[Piece]:
        """As few pieces as fit, by first fit over the responses; the prompt stands in each."""
        room = max_tokens - self.prompts[members[0]]
        if room < 1:
            return [(i,) for i in members]
        bins = pack(range(len(members)), [self.lengths[i] - self.prompts[i] for i in members], room)
        return [tuple(members[position] for position in part) for part in bins]

    def _spread(self, pieces: Sequence[Piece], num_ranks: int) -> list[list[Piece]]:
        ranks = balance(range(len(pieces)), [self.tokens(piece) for piece in pieces], num_ranks)
        return [[pieces[i] for i in rank] for rank in ranks]

    def _packed(self, pieces: Sequence[Piece], max_tokens: int) -> list[list[int]]:
        bins = pack(range(len(pieces)), [self.tokens(piece) for piece in pieces], max_tokens)
        return [sorted(sample for i in part for sample in pieces[i]) for part in bins]


def _cuts(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """``pieces``, all of them halved, and so on down to single samples."""
    yield pieces
    while any(len(piece) > 1 for piece in pieces):
        pieces = [half for piece in pieces for half in _halves(piece)]
        yield pieces


def _halves(piece: Piece) -> list[Piece]:
    middle = (len(piece) + 1) // 2
    return [half for half in (piece[:middle], piece[middle:]) if half]
