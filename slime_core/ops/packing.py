"""Divides samples over ranks, optimizer steps and packed rows. Plain Python over lengths.

Nothing is dropped: every sample lands on exactly one rank, in exactly one micro-batch of exactly one step. A sample
longer than the token budget runs alone. Ranks may run different numbers of micro-batches: no collective spans
data-parallel ranks inside one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

__all__ = [
    "balance",
    "pack",
    "pack_by_count",
    "row_budget",
    "split_steps",
]


def row_budget(max_tokens: int, *, context: int, multiple: int) -> int:
    """Tokens of a row such that padding does not take it above the limit; below one ``multiple``, the limit itself.

    Arguments:
        max_tokens: of one rank.
        context: ranks that share every row.
        multiple: what a row is padded to a multiple of.
    """
    tokens = max_tokens * context
    return tokens // multiple * multiple or tokens


def split_steps(rollouts: Sequence[int], num_steps: int) -> list[list[int]]:
    """Cut ``rollouts`` into ``num_steps`` consecutive parts whose sizes differ by at most one.

    Raises:
        ValueError: there are fewer rollouts than steps.
    """
    if len(rollouts) < num_steps:
        raise ValueError(
            f"{len(rollouts)} rollouts cannot fill {num_steps} optimizer steps; every step needs at least one"
        )
    size, rest = divmod(len(rollouts), num_steps)
    starts = [step * size + min(step, rest) for step in range(num_steps + 1)]
    return [list(rollouts[a:b]) for a, b in pairwise(starts)]


def balance(samples: Sequence[int], costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Give every sample to one of ``num_ranks`` ranks so that their costs come out close (costliest first, to the
    lightest).

    Arguments:
        samples: positions into ``costs``.
        costs: tokens or work of each sample.

    Returns:
        One list of positions a rank, in ascending order. No rank is empty while there are at least as many samples as
        ranks.
    """
    return _spread(samples, costs, num_ranks)


def _spread(samples: Sequence[int], costs: Sequence[int], num_bins: int, size: int | None = None) -> list[list[int]]:
    """Costliest first, to the lightest bin of less than ``size`` samples; None: of any number."""
    loads = [(0, 0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in sorted(samples, key=lambda position: (-costs[position], position)):
        cost, count, number = heapq.heappop(loads)
        bins[number].append(sample)
        if count + 1 != size:
            heapq.heappush(loads, (cost + costs[sample], count + 1, number))
    return [sorted(members) for members in bins]


def pack_by_count(samples: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Group ``samples`` into as few micro-batches of at most ``size`` samples as there can be, with close token counts.

    Example: 7 samples by 3 make 3 micro-batches.

    Arguments:
        samples: positions into ``lengths``.
    """
    return _spread(samples, lengths, -(-len(samples) // size), size)


def pack(samples: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group ``samples`` into micro-batches of at most ``max_tokens`` tokens, by first fit over decreasing length.

    First-fit decreasing needs at most 11/9 of the optimal number of bins, plus one (Johnson, 1973).

    Arguments:
        samples: positions into ``lengths``.
        max_tokens: tokens of one packed micro-batch; a longer sample runs alone.

    Raises:
        ValueError: ``max_tokens`` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"a micro-batch of {max_tokens} tokens; accepted: at least 1 (--max-tokens-per-gpu)")
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda position: (-lengths[position], position)):
        target = next((b for b, free in enumerate(room) if free >= lengths[sample]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[target].append(sample)
        room[target] -= lengths[sample]
    return [sorted(members) for members in bins]
