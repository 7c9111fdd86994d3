"""Which tokens of a packed row each context-parallel rank holds, and what it needs of the others.

    zigzag   which tokens of a row one rank holds
    Share    what such a rank computes of the row's attention, and which keys of others it needs for that

A row of t tokens is split over c ranks in 2c chunks of equal length, and rank r takes the chunks r and 2c - 1 - r:
under a causal mask early queries see few keys and late ones many, so that every rank has about the same work in a row
that is one long sequence (the split that Megatron makes of one sequence, models/common/embeddings/rope_utils.py:130).
The split is of the row, not of every sequence: nothing has to be padded to a multiple of 2c but the row. A chunk is one
stretch of the row, so at most one sequence enters it from before. Its tokens in the chunk are *crossing* and need keys
of other ranks; all other tokens of the chunk see only tokens of the chunk itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from slime_core.modeling.rows import Packing

__all__ = ["Share", "zigzag"]


def zigzag(num_tokens: int, *, rank: int, size: int) -> np.ndarray:
    """Places in the row of the tokens that context-parallel rank ``rank`` of ``size`` holds, in its order: int64.

    Example: 8 tokens over 2 ranks: ``[0, 1, 6, 7]`` and ``[2, 3, 4, 5]``.

    Raises:
        ValueError: ``num_tokens`` is not a multiple of ``2 * size`` (with one rank, anything is accepted).
    """
    if size == 1:
        return np.arange(num_tokens)
    if num_tokens % (2 * size):
        raise ValueError(f"{num_tokens} tokens cannot be split into {2 * size} equal chunks; pad the row first")
    chunks = np.arange(num_tokens).reshape(2 * size, -1)
    return np.asarray(chunks[[rank, 2 * size - 1 - rank]].ravel())


@dataclass(frozen=True, slots=True)
class Share:
    """What one context-parallel rank computes of a row's attention.

    Example: sequences of 3 and 5 tokens over 2 ranks, so chunks of 2. Rank 1 holds tokens 2, 3 and 4, 5. Token 2
    crosses into its first chunk, 4 and 5 into its second: ``sizes = (1, 1, 2, 0)``. The keys of all ranks, gathered,
    stand in the order 0 1 6 7 2 3 4 5, in which ``keys`` finds tokens 0 to 2 and 3 to 5: ``([0, 1, 4], [5, 6, 7])``.

    Arguments:
        sizes: of each chunk the number of crossing and of other tokens.
        keys: int64, of each chunk's crossing tokens: rows of the gathered keys from their sequence's start to
            themselves; empty if none cross.
        rest: the packing of the tokens that do not cross.
        exchanges: whether any rank has crossing tokens, so that keys have to be gathered.
    """

    sizes: tuple[int, int, int, int]
    keys: tuple[torch.Tensor, torch.Tensor]
    rest: Packing
    exchanges: bool

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, rank: int, size: int) -> Share:
        """The share of rank ``rank`` of ``size``; computed at the first call for this tensor of a process.

        Arguments:
            cu_seqlens: of the whole row, as :meth:`Packing.of` takes it.
            num_tokens: of this rank: ``2 * size`` chunks of half as many make the row.
        """
        found: Share | None = _SHARES.get(cu_seqlens)
        if found is None:
            ends = torch.cat([cu_seqlens.cpu().long(), torch.tensor([num_tokens * size])]).unique()
            found = _SHARES[cu_seqlens] = _share(ends, num_tokens // 2, rank, size, cu_seqlens.device)
        return found


_SHARES = WeakTensorKeyDictionary()


def _share(ends: torch.Tensor, chunk: int, rank: int, size: int, device: torch.device) -> Share:
    """``ends``: int64, where sequences start and end, each once, from 0 to the end of the row."""
    sizes, keys, lengths = [], [], []
    for start in (rank * chunk, (2 * size - 1 - rank) * chunk):
        begins, crossing = _crossing(ends, start, chunk)
        inner = ends[(ends > start + crossing) & (ends < start + chunk)]
        borders = torch.cat([torch.tensor([start + crossing]), inner, torch.tensor([start + chunk])])
        sizes += [crossing, chunk - crossing]
        lengths.append(borders.diff())
        keys.append(_gathered(torch.arange(begins, start + crossing if crossing else begins), chunk, size).to(device))
    rest = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)]).to(device)
    exchanges = any(start not in ends for start in range(0, 2 * size * chunk, chunk))
    return Share(
        sizes=(sizes[0], sizes[1], sizes[2], sizes[3]),
        keys=(keys[0], keys[1]),
        rest=Packing.of(rest, num_tokens=sizes[1] + sizes[3]),
        exchanges=exchanges,
    )


def _crossing(ends: torch.Tensor, start: int, chunk: int) -> tuple[int, int]:
    """Where the sequence at ``start`` begins, and how many of its tokens in this chunk come after its beginning."""
    place = int(torch.searchsorted(ends, start, right=True))
    begins, stops = int(ends[place - 1]), int(ends[place])
    return begins, 0 if begins == start else min(stops, start + chunk) - start


def _gathered(places: torch.Tensor, chunk: int, size: int) -> torch.Tensor:
    """Where tokens at these places of the row stand when all ranks' tokens are joined in rank order."""
    number, offset = places // chunk, places % chunk
    late = number >= size
    owner = torch.where(late, 2 * size - 1 - number, number)
    return (2 * owner + late) * chunk + offset
