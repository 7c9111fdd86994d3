"""Reward models that need no model: ``exact_match``, ``random`` and ``zero``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from slime_core import RunView
from slime_core.types import Sample, label_text

__all__ = ["ExactMatch", "NoReward", "Random"]


class ExactMatch:
    """1.0 if the response equals the label, both without surrounding white space; else 0.0."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [float(sample.response.strip() == label_text(sample, "exact_match")) for sample in samples]


class Random:
    """A fair coin, 0.0 or 1.0, that is the same for the same seed, group and index.

    Another seed of the run gives other coins.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options
        self._seed = run.seed

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample, in order; ignores the response."""
        return [float(self._coin(sample)) for sample in samples]

    def _coin(self, sample: Sample) -> int:
        # A hash, not a generator: the coin must not depend on the scoring process or on the order.
        key = f"{self._seed}/{sample.group_index}/{sample.index}"
        return hashlib.sha256(key.encode()).digest()[0] & 1


class NoReward:
    """0.0 for every sample: for runs that learn from a teacher or from labels alone."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample; ignores the response."""
        return [0.0] * len(samples)
