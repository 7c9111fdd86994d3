"""Prompts of several streams in fixed shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.provisional import PromptRow
from slime_datasets.numbered import Stream

__all__ = ["Mixed", "shares", "spread"]

BLOCK = 1000
"""Prompts of one block, in which each stream has its share; fewer if the shares have a common divisor."""


class Mixed:
    """Several streams, interleaved evenly; each counts epochs separately.

    Arguments:
        parts: streams and their weights.

    Raises:
        DataError: a weight is less than a thousandth of the sum.
    """

    def __init__(self, parts: Sequence[tuple[Stream, float]]) -> None:
        self._streams = [stream for stream, _ in parts]
        self._counts = shares([weight for _, weight in parts])
        self._slots = spread(self._counts)
        self._ranks = [self._slots[:slot].count(stream) for slot, stream in enumerate(self._slots)]

    def at(self, number: int) -> PromptRow:
        """See :class:`Stream`."""
        stream, inner = self._find(number)
        return self._streams[stream].at(inner)

    def prepare(self, stop: int) -> None:
        """See :class:`Stream`."""
        block, slot = divmod(stop, len(self._slots))
        for number, stream in enumerate(self._streams):
            stream.prepare(block * self._counts[number] + self._slots[:slot].count(number))

    def identity(self) -> dict[str, Any]:
        """See :class:`Stream`."""
        return {"shares": self._counts, "parts": [stream.identity() for stream in self._streams]}

    def state(self, numbers: Sequence[int]) -> dict[str, Any]:
        """See :class:`Stream`."""
        positions = [self._find(number) for number in numbers]
        of_each = [[inner for stream, inner in positions if stream == number] for number in range(len(self._streams))]
        return {"streams": [stream.state(inner) for stream, inner in zip(self._streams, of_each, strict=True)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stream`."""
        for stream, its in zip(self._streams, state["streams"], strict=True):
            stream.restore(its)

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    def _find(self, number: int) -> tuple[int, int]:
        """Return the stream of prompt ``number``, and the prompt's number in that stream."""
        block, slot = divmod(number, len(self._slots))
        stream = self._slots[slot]
        return stream, block * self._counts[stream] + self._ranks[slot]


def shares(weights: Sequence[float]) -> list[int]:
    """Return each weight's number of prompts out of a thousand, by largest remainders, over their common divisor.

    Example: ``shares([0.7, 0.3])`` is ``[7, 3]``.

    Raises:
        DataError: a weight gets no prompt.
    """
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    counts = [int(share + 1e-9) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda place: counts[place] - exact[place])
    for place in by_rest[: BLOCK - sum(counts)]:
        counts[place] += 1
    if min(counts) == 0:
        weight = weights[counts.index(0)]
        raise DataError(
            f"prompt_mix: weight {weight:g} of {sum(weights):g} is less than one prompt in {BLOCK}; accepted: "
            "larger shares"
        )
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


def spread(counts: Sequence[int]) -> list[int]:
    """Return a list of stream numbers, in which stream i occurs ``counts[i]`` times, spaced as evenly as possible.

    Example: ``spread([2, 1])`` is ``[0, 1, 0]``.
    """
    total, used, slots = sum(counts), [0] * len(counts), []
    for slot in range(1, total + 1):
        late = max(range(len(counts)), key=lambda stream: counts[stream] * slot - used[stream] * total)
        used[late] += 1
        slots.append(late)
    return slots
