"""Divides samples over ranks, optimizer steps and packed rows, by their lengths. The sampler plans a rollout with it;
the learner reshards and splits rows with it.

Every sample is on exactly one rank, in exactly one micro-batch of exactly one step. A sample longer than the token
budget gets a separate micro-batch. Ranks may run different numbers of micro-batches, because no collective spans
data-parallel ranks inside a micro-batch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["balance", "pack", "pack_by_count", "row_budget", "split_steps"]


def row_budget(max_tokens: int, *, context: int, multiple: int) -> int:
    """Return the most tokens of a row that padding keeps within the limit; the limit if it is below ``multiple``.

    Arguments:
        max_tokens: limit of tokens for each rank.
        context: ranks that share every row.
        multiple: number to a multiple of which a row is padded.
    """
    tokens = max_tokens * context
    return tokens // multiple * multiple or tokens


def split_steps(rollouts: Sequence[int], num_steps: int) -> list[list[int]]:
    """Split ``rollouts`` into ``num_steps`` consecutive parts whose sizes differ by at most one.

    Raises:
        ValueError: there are fewer rollouts than steps.
    """
    if len(rollouts) < num_steps:
        raise ValueError(
            f"{len(rollouts)} rollouts cannot fill {num_steps} optimizer steps; every step needs at least one"
        )
    size, remainder = divmod(len(rollouts), num_steps)
    starts = [step * size + min(step, remainder) for step in range(num_steps + 1)]
    return [list(rollouts[a:b]) for a, b in pairwise(starts)]


def balance(samples: Sequence[int], costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign every sample to one of ``num_ranks`` ranks so that the ranks' costs are close.

    Samples go to the lightest rank, the costliest sample first. Then the heaviest and the lightest rank swap samples as
    long as a swap makes the heavier of the two lighter.

    Arguments:
        samples: positions into ``costs``.
        costs: tokens or work of each sample.

    Returns:
        One list of positions per rank, in ascending order. No rank is empty if there are at least as many samples as
        ranks.
    """
    return _even_out(_assign(samples, costs, num_ranks), costs)


def _assign(samples: Sequence[int], costs: Sequence[int], num_bins: int, size: int | None = None) -> list[list[int]]:
    """Assign samples, the costliest first, to the lightest bin of less than ``size`` samples, if there is a limit."""
    loads = [(0, 0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for sample in sorted(samples, key=lambda position: (-costs[position], position)):
        cost, count, number = heapq.heappop(loads)
        bins[number].append(sample)
        if count + 1 != size:
            heapq.heappush(loads, (cost + costs[sample], count + 1, number))
    return [sorted(members) for members in bins]


def _even_out(bins: list[list[int]], costs: Sequence[int]) -> list[list[int]]:
    """Swap samples between the heaviest and the lightest bin until no swap makes the heavier of the two lighter.

    Example: bins with the costs 3 2 2 and 3 2 become 2 2 2 and 3 3.
    """
    loads = [sum(costs[sample] for sample in members) for members in bins]
    while True:
        heavy, light = (choose(range(len(bins)), key=loads.__getitem__) for choose in (max, min))
        swap = _find_swap(bins[heavy], bins[light], costs, loads[heavy] - loads[light])
        if swap is None:
            return [sorted(members) for members in bins]
        heavier, lighter = swap
        bins[heavy] = [sample for sample in bins[heavy] if sample != heavier] + lighter
        bins[light] = [sample for sample in bins[light] if sample not in lighter] + [heavier]
        moved = costs[heavier] - sum(costs[sample] for sample in lighter)
        loads[heavy] -= moved
        loads[light] += moved


def _find_swap(
    heavy: Sequence[int], light: Sequence[int], costs: Sequence[int], gap: int
) -> tuple[int, list[int]] | None:
    """Find the swap that best halves ``gap``: a sample to move from heavy to light, and at most one to move back.

    Returns:
        None if no swap helps.
    """
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
    """Group ``samples`` into the fewest micro-batches of at most ``size`` samples, with close token counts.

    Example: 7 samples in micro-batches of at most 3 make 3 micro-batches.

    Arguments:
        samples: positions into ``lengths``.
    """
    return _assign(samples, lengths, -(-len(samples) // size), size)


def pack(samples: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group ``samples`` into micro-batches of at most ``max_tokens`` tokens, by first fit over decreasing length.

    First-fit decreasing needs at most 11/9 of the optimal number of bins, plus one (Johnson, 1973).

    Arguments:
        samples: positions into ``lengths``.
        max_tokens: tokens of one packed micro-batch; a longer sample gets a separate one.

    Raises:
        ValueError: ``max_tokens`` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"a micro-batch of {max_tokens} tokens; accepted: at least 1 (--max-tokens-per-gpu)")
    bins: list[list[int]] = []
    free: list[int] = []  # tokens that still fit, per bin
    shortest = min((lengths[sample] for sample in samples), default=0)
    open_bins: list[int] = []  # full bins are left out, so that the time does not grow with their number
    for sample in sorted(samples, key=lambda position: (-lengths[position], position)):
        length = lengths[sample]
        place = next((place for place, number in enumerate(open_bins) if free[number] >= length), len(open_bins))
        if place == len(open_bins):
            open_bins.append(len(bins))
            bins.append([])
            free.append(max_tokens)
        number = open_bins[place]
        bins[number].append(sample)
        free[number] -= length
        if free[number] < shortest:
            del open_bins[place]
    return [sorted(members) for members in bins]
