"""What an evaluation found: the mean reward overall, and by every value of every metadata field with few values; how
often one of k responses solves a prompt; how long responses are."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slime_core.types import Sample, Status

__all__ = ["EvalScores", "pass_at", "pass_rates", "score"]

MOST_VALUES = 12
"""A metadata field with more values than this describes single prompts, not kinds of prompts."""

MOST_LETTERS = 60
"""Of a metadata field and of its values; a longer one is text."""


@dataclass(frozen=True, slots=True)
class EvalScores:
    """Example: ``EvalScores(mean=0.31, count=500, truncated=0.0, by={"carries": {"0": (0.99, 150), "1": (0.02,
    250)}}, pass_at={1: 0.31}, lengths=(3.2, 5))``.

    Arguments:
        mean: mean reward over all samples.
        count: samples.
        truncated: share of samples cut at the length limit.
        by: metadata field -> value -> (mean reward, samples).
        pass_at: k -> estimated share of prompts that one of k responses solves.
        lengths: mean and largest response length in tokens, of the samples that were answered; None: none was.
    """

    mean: float
    count: int
    truncated: float
    by: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    pass_at: dict[int, float] = field(default_factory=dict)
    lengths: tuple[float, int] | None = None

    def metrics(self, prefix: str) -> dict[str, float]:
        """Flat metrics: ``prefix``, ``prefix-truncated_ratio``, ``prefix-pass@1``, ``prefix/carries=1`` and so on."""
        flat = {prefix: self.mean, f"{prefix}-truncated_ratio": self.truncated}
        flat |= {f"{prefix}-pass@{k}": share for k, share in self.pass_at.items()}
        if self.lengths is not None:
            flat |= {
                f"{prefix}/response_len/mean": self.lengths[0],
                f"{prefix}/response_len/max": float(self.lengths[1]),
            }
        for name, values in self.by.items():
            flat |= {f"{prefix}/{name}={value}": mean for value, (mean, _) in values.items()}
        return flat


def score(samples: Sequence[Sample], *, key: str | None, threshold: float = 1.0) -> EvalScores:
    """The scores of rewarded samples, in whatever order.

    Arguments:
        key: which of several rewards counts.
        threshold: reward from which on a response solves its prompt.

    Raises:
        ValueError: there are none, or one has no reward.
    """
    if not samples:
        raise ValueError("an evaluation without samples has no score")
    rewards = [sample.reward_value(key) for sample in samples]
    truncated = statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples)
    return EvalScores(
        statistics.fmean(rewards),
        len(samples),
        truncated,
        by=_by_metadata(samples, rewards),
        pass_at=pass_rates(_solved(samples, rewards, threshold), of_all=True),
        lengths=_lengths(samples),
    )


def pass_at(k: int, *, n: int, solved: int) -> float:
    """The chance that at least one of ``k`` responses, drawn without replacement from ``n`` of which ``solved`` solve
    the prompt, solves it: the unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not ``1 <= k <= n`` and ``0 <= solved <= n``.
    """
    if not (1 <= k <= n and 0 <= solved <= n):
        raise ValueError(f"pass@{k} of {n} responses, {solved} of them solved, is not defined; 1 <= k <= n is needed")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def pass_rates(prompts: Iterable[Sequence[bool]], *, of_all: bool = False) -> dict[int, float]:
    """k -> pass@k, for k = 1, 2, 4, ... up to the most responses that a prompt has: the mean over the prompts that have
    as many.

    Arguments:
        prompts: of each prompt, which of its responses solve it.
        of_all: also for k = the most responses that a prompt has, where that is no power of two.
    """
    counts = [(len(one), sum(one)) for one in prompts]
    most = max((n for n, _ in counts), default=0)
    ks = sorted({1 << place for place in range(most.bit_length())} | ({most} if of_all and most else set()))
    return {k: statistics.fmean(pass_at(k, n=n, solved=solved) for n, solved in counts if n >= k) for k in ks}


def _solved(samples: Sequence[Sample], rewards: Sequence[float], threshold: float) -> list[list[bool]]:
    """Of each prompt, which of its generations solve it. Siblings that one generation fanned out into are one, which
    solves the prompt if one of them does; a sample without a group is a prompt of its own."""
    prompts: dict[object, dict[object, bool]] = defaultdict(dict)
    for place, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        group = ("alone", place) if sample.group_index is None else sample.group_index
        alone = ("sample", place) if sample.index is None else sample.index
        generation = alone if sample.rollout_id is None else ("rollout", sample.rollout_id)
        found = prompts[group]
        found[generation] = found.get(generation, False) or reward >= threshold
    return [list(found.values()) for found in prompts.values()]


def _by_metadata(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, dict[str, tuple[float, int]]]:
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, reward in zip(samples, rewards, strict=True):
        for name, value in sample.metadata.items():
            if isinstance(value, str | int | bool):
                kinds[name][str(value)].append(reward)
    return {
        name: {value: (statistics.fmean(found), len(found)) for value, found in sorted(values.items())}
        for name, values in sorted(kinds.items())
        if 1 < len(values) <= MOST_VALUES and all(map(_is_word, (name, *values)))
    }


def _is_word(text: str) -> bool:
    """Whether the name of a metric can carry it."""
    return len(text) <= MOST_LETTERS and text.isprintable()


def _lengths(samples: Sequence[Sample]) -> tuple[float, int] | None:
    lengths = [sample.response_length for sample in samples if sample.status in (Status.COMPLETED, Status.TRUNCATED)]
    return (statistics.fmean(lengths), max(lengths)) if lengths else None
