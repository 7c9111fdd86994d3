"""Weighted sums of reward models; the reward of each part is stored in the sample's metadata."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Protocol, cast

from slime_core.config.reward_sum import RewardTerm
from slime_core.rollout.run_all import run_all
from slime_core.types import Reward, RewardFailure, Sample

__all__ = ["PARTS", "Scorer", "WeightedSum", "part_metrics"]

PARTS = "reward_parts"
"""Key of a sample's metadata: part of the sum -> its reward, unweighted."""


class Scorer(Protocol):
    """A reward model as the sampler calls it."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward or failure per sample, in order."""
        ...


class WeightedSum:
    """The sum of several reward models' rewards, each times its weight.

    Example: of ``0.7*math+0.3*f1``, a sample with the rewards 1.0 and 0.5 gets 0.85, and ``{"math": 1.0, "f1": 0.5}``
    as ``reward_parts`` in its metadata.

    Arguments:
        written: the sum as the user wrote it, for messages.
        parts: its terms with their scorers.
    """

    def __init__(self, written: str, parts: Sequence[tuple[RewardTerm, Scorer]]) -> None:
        self._written, self._parts = written, parts

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward per sample, in order; if a part fails, that failure."""
        columns = await run_all(scorer.score(samples) for _, scorer in self._parts)
        return [self._sum(sample, row) for sample, *row in zip(samples, *columns, strict=True)]

    def _sum(self, sample: Sample, row: Sequence[Reward | RewardFailure]) -> Reward | RewardFailure:
        found: dict[str, float] = {}
        for (term, _), answer in zip(self._parts, row, strict=True):
            value = self._value(term, answer)
            if isinstance(value, RewardFailure):
                return value
            found[str(term)] = value
        # A copy, because the samples of a group share the metadata of their row.
        sample.metadata = {**sample.metadata, PARTS: found}
        total = _sum(term.weight * found[str(term)] for term, _ in self._parts)
        if not math.isfinite(total):
            return RewardFailure("invalid", f"{self._written!r} of {found} is {total}; accepted is a finite number")
        return total

    def _value(self, term: RewardTerm, answer: Reward | RewardFailure) -> float | RewardFailure:
        if isinstance(answer, RewardFailure):
            return RewardFailure(answer.cause, f"part {term} of {self._written!r}: {answer.error}", answer.lost)
        value = answer.get(term.key or "") if isinstance(answer, dict) else answer
        is_plain = isinstance(answer, dict) == (term.key is not None)
        if is_plain and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        accepted = "a finite number" if term.key is None else f"a table with a finite number {term.key!r}"
        names = f"; name one of them, such as {term.name}:{min(answer)}" if isinstance(answer, dict) and answer else ""
        return RewardFailure(
            "invalid", f"part {term} of {self._written!r} returned {answer!r}; accepted is {accepted}{names}"
        )


def _sum(values: Iterable[float]) -> float:
    """Exact sum (math.fsum); NaN on overflow."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def part_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """The mean reward of every part of a sum over the samples that have it, as ``prefix/PART``."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        parts = cast(dict[str, float], sample.metadata.get(PARTS) or {})
        for part, reward in parts.items():
            found[part].append(reward)
    return {f"{prefix}/{part}": fmean(rewards) for part, rewards in sorted(found.items())}
