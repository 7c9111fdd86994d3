"""What an evaluation found: the mean reward overall, and by every value of every metadata field with few values."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_core.types import Sample, Status

__all__ = ["EvalScores", "score"]

MOST_VALUES = 12
"""A metadata field with more values than this describes single prompts, not kinds of prompts."""


@dataclass(frozen=True, slots=True)
class EvalScores:
    """Example: ``EvalScores(mean=0.31, count=500, truncated=0.0, by={"carries": {"0": (0.99, 150), "1": (0.02,
    250)}})``.

    Arguments:
        mean: mean reward over all samples.
        count: samples.
        truncated: share of samples cut at the length limit.
        by: metadata field -> value -> (mean reward, samples).
    """

    mean: float
    count: int
    truncated: float
    by: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Flat metrics: ``prefix``, ``prefix-truncated_ratio``, ``prefix/carries=1`` and so on."""
        flat = {prefix: self.mean, f"{prefix}-truncated_ratio": self.truncated}
        for name, values in self.by.items():
            flat |= {f"{prefix}/{name}={value}": mean for value, (mean, _) in values.items()}
        return flat


def score(samples: Sequence[Sample], *, key: str | None) -> EvalScores:
    """The scores of rewarded samples.

    Raises:
        ValueError: there are none, or one has no reward.
    """
    if not samples:
        raise ValueError("an evaluation without samples has no score")
    rewards = [sample.reward_value(key) for sample in samples]
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, reward in zip(samples, rewards, strict=True):
        for name, value in sample.metadata.items():
            if isinstance(value, str | int | bool):
                kinds[name][str(value)].append(reward)
    by = {
        name: {value: (statistics.fmean(found), len(found)) for value, found in sorted(values.items())}
        for name, values in sorted(kinds.items())
        if 1 < len(values) <= MOST_VALUES
    }
    truncated = statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples)
    return EvalScores(statistics.fmean(rewards), len(samples), truncated, by)
