"""Divides samples over ranks, optimizer steps and packed rows. Plain Python over lengths.

Nothing is dropped: every sample lands on exactly one rank, in exactly one micro-batch of exactly one step. A sample
longer than the token budget runs alone. Ranks may run different numbers of micro-batches: no collective spans
data-parallel ranks inside one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["balance", "pack", "pack_by_count", "row_budget", "split_steps"]


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
    """Give every sample to one of ``num_ranks`` ranks so that their costs come out close: costliest first, to the
    lightest; then the heaviest rank and the lightest exchange samples as long as that evens them out.

    Arguments:
        samples: positions into ``costs``.
        costs: tokens or work of each sample.

    Returns:
        One list of positions a rank, in ascending order. No rank is empty while there are at least as many samples as
        ranks.
    """
    return _exchanged(_spread(samples, costs, num_ranks), costs)


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


def _exchanged(bins: list[list[int]], costs: Sequence[int]) -> list[list[int]]:
    """``bins``, of which the heaviest has given a sample to the lightest, or taken a cheaper one for it, until none
    makes the heavier of the two lighter.

    Example: costs of 3 2 2 and 3 2 become 2 2 2 and 3 3.
    """
    loads = [sum(costs[sample] for sample in members) for members in bins]
    while True:
        heavy, light = (choose(range(len(bins)), key=loads.__getitem__) for choose in (max, min))
        found = _exchange(bins[heavy], bins[light], costs, loads[heavy] - loads[light])
        if found is None:
            return [sorted(members) for members in bins]
        given, taken = found
        bins[heavy] = [sample for sample in bins[heavy] if sample != given] + taken
        bins[light] = [sample for sample in bins[light] if sample not in taken] + [given]
        moved = costs[given] - sum(costs[sample] for sample in taken)
        loads[heavy] -= moved
        loads[light] += moved


def _exchange(
    heavy: Sequence[int], light: Sequence[int], costs: Sequence[int], gap: int
) -> tuple[int, list[int]] | None:
    """The sample to give and the one to take, or none, whose costs differ by nearest to half of ``gap``, and by less
    than all of it; None: there are none."""
    if gap < 2:
        return None
    offered = sorted([(0, -1), *((costs[sample], sample) for sample in light)])
    best: tuple[float, int, int] | None = None
    for sample in heavy:
        place = bisect_left(offered, (costs[sample] - gap / 2, -1))
        for cost, other in offered[max(0, place - 1) : place + 1]:
            moved = costs[sample] - cost
            if 0 < moved < gap and (best is None or abs(moved - gap / 2) < best[0]):
                best = abs(moved - gap / 2), sample, other
    return None if best is None else (best[1], [best[2]] if best[2] >= 0 else [])


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
    shortest = min((lengths[sample] for sample in samples), default=0)
    has_room: list[int] = []  # bins for another sample: without the others, the time does not grow with their number
    for sample in sorted(samples, key=lambda position: (-lengths[position], position)):
        length = lengths[sample]
        place = next((place for place, number in enumerate(has_room) if room[number] >= length), len(has_room))
        if place == len(has_room):
            has_room.append(len(bins))
            bins.append([])
            room.append(max_tokens)
        number = has_room[place]
        bins[number].append(sample)
        room[number] -= length
        if room[number] < shortest:
            del has_room[place]
    return [sorted(members) for members in bins]
