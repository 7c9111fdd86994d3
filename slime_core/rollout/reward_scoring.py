"""Scores samples: a finished sample gets its reward, or has failed with a cause.

    RewardDispatcher   calls the reward model of a sample, checks the reward, and counts failures
    make_scorer        name -> scorer: in the pool of reward processes, or in the sampler if the traits of the reward
                       model have ``isolated=False``
    WeightedSum        a sum of reward models; the reward of each part is stored in the sample's metadata

A scorer returns a reward or a :class:`~slime_core.types.RewardFailure` for each sample. An evaluation counts a sample
without a usable reward as wrong; training leaves it out.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from numbers import Real
from statistics import fmean
from typing import Any, Protocol, cast

from slime_core.config.sampling import RewardTerm, RolloutConfig, reward_terms
from slime_core.errors import RunError, SlimeError
from slime_core.generation.context import run_all
from slime_core.generation.sampling import UNANSWERED, is_finished
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.rollout.reward_pool import RewardPool
from slime_core.rollout.routing import RoutedComponent
from slime_core.types import Reward, RewardFailure, Sample, Status
from slime_core.user_code.failures import boundary

ACCEPTED = "accepted: a finite number or a dict of them with --reward-key"

LARGEST = sys.float_info.max
"""``math.isfinite`` raises OverflowError on larger integers."""


class RewardDispatcher:
    """Calls reward models, and counts samples without a reward.

    Arguments:
        rollout: ``reward_key`` is the default for rows without a reward key.

    Attributes:
        num_in_flight: samples that wait for a reward.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._key = rollout.reward_key
        self._failures: Counter[str] = Counter()
        self.num_in_flight = 0

    async def score(
        self, reward_model: RoutedComponent, samples: list[Sample], *, evaluation: bool = False
    ) -> list[Sample]:
        """Score the finished samples without a reward; return all samples.

        Raises:
            RunError: a reward model in this process returned too few or too many rewards.
            PluginError: the processes of reward models cannot load the plugins.
        """
        scorable = [sample for sample in samples if is_finished(sample)]
        missing = [sample for sample in scorable if sample.reward is None]
        rewarded = [(sample, sample.reward) for sample in scorable if sample.reward is not None]
        self.num_in_flight += len(missing)
        try:
            answers = await reward_model.component.score(missing) if missing else []
        finally:
            self.num_in_flight -= len(missing)
        for sample, answer in zip(missing, answers, strict=True):
            self._settle(sample, answer, f"reward model {reward_model.name!r} returned", evaluation=evaluation)
        for sample, reward in rewarded:
            self._settle(sample, reward, "the generate function set the reward", evaluation=evaluation)
        return samples

    def unanswered(self, samples: Sequence[Sample]) -> None:
        """Count samples of an evaluation that no engine has answered as wrong, under the cause ``engine``."""
        for sample in samples:
            self._failures[UNANSWERED] += 1
            self._count_as_wrong(sample)

    def take_failures(self) -> dict[str, float]:
        """Return cause -> number of samples without a reward, since the last call."""
        failures, self._failures = self._failures, Counter()
        return {cause: float(count) for cause, count in failures.items()}

    def _settle(self, sample: Sample, answer: Any, source: str, *, evaluation: bool) -> None:
        reward = float(answer) if isinstance(answer, Real) and not isinstance(answer, int | float) else answer
        if not _is_usable(reward, sample.reward_key(self._key)):
            row_key = f" (its row names {sample.reward_key()})" if sample.reward_key() else ""
            reward = RewardFailure("invalid", f"{source} {answer!r:.200}; {ACCEPTED}{row_key}")
        if isinstance(reward, RewardFailure):
            self._fail(sample, reward, evaluation=evaluation)
        else:
            sample.reward = reward

    def _fail(self, sample: Sample, failure: RewardFailure, *, evaluation: bool) -> None:
        """Mark ``sample`` as failed; an evaluation counts it as wrong instead."""
        self._failures[failure.cause] += 1
        sample.error, sample.failure_cause = failure.error, f"reward_{failure.cause}"
        if evaluation:
            self._count_as_wrong(sample)
        else:
            sample.status, sample.reward = Status.FAILED, None

    def _count_as_wrong(self, sample: Sample) -> None:
        key = sample.reward_key(self._key)
        sample.reward = 0.0 if key is None else {key: 0.0}


def _is_usable(answer: Any, key: str | None) -> bool:
    if isinstance(answer, dict):
        answer = answer.get(key or "")
    return isinstance(answer, RewardFailure) or (isinstance(answer, int | float) and abs(answer) <= LARGEST)


def make_scorer(name: str, registry: Registry, *, make: Callable[[str], Any], pool: RewardPool | None) -> Scorer:
    """Return the scorer of a reward model, or of a weighted sum of several.

    Arguments:
        registry: has the traits of each reward model.
        make: constructs a reward model that runs in the sampler.
        pool: of the other reward models. None: no manifest exists for processes, so all run in the sampler.
    """
    terms = reward_terms(name)
    if terms is not None:
        return WeightedSum(name, [(term, make_scorer(term.name, registry, make=make, pool=pool)) for term in terms])
    traits = registry.traits(Kind.REWARD_MODEL, name)
    if pool is None or not traits.isolated:
        return InProcessScorer(name, make(name))
    return PoolScorer(name, pool, together=traits.scope == "group")


class InProcessScorer:
    """A reward model that runs in the sampler; an exception ends the run."""

    def __init__(self, name: str, component: Any) -> None:
        self._name = name
        self._component = component

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """Return one reward per sample, in order; not yet validated.

        Raises:
            PluginError: it failed.
            RunError: it returned a wrong number of rewards.
        """
        with boundary(f"reward model {self._name!r}", "scoring", locate=True, passes=(SlimeError,)):
            rewards = list(await self._component.score(samples))
        if len(rewards) != len(samples):
            raise RunError(f"reward model {self._name!r} returned {len(rewards)} rewards for {len(samples)} samples")
        return rewards


class PoolScorer:
    """A reward model in the pool, with ``together`` as in :meth:`RewardPool.score`."""

    def __init__(self, name: str, pool: RewardPool, *, together: bool) -> None:
        self._name = name
        self._pool = pool
        self._together = together

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """Return one reward or failure per sample, in order."""
        return await self._pool.score(self._name, samples, together=self._together)


PARTS = "reward_parts"
"""Key of a sample's metadata: part of the sum -> its reward, unweighted."""


class Scorer(Protocol):
    """A reward model as the sampler calls it."""

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """Return one reward or failure per sample, in order."""
        ...


class WeightedSum:
    """The sum of several reward models' rewards, each times its weight.

    Example: with ``0.7*math+0.3*f1``, a sample with the rewards 1.0 and 0.5 gets 0.85, and ``{"math": 1.0, "f1": 0.5}``
    as ``reward_parts`` in its metadata.

    Arguments:
        expression: the sum as the user wrote it, for messages.
        parts: its terms with their scorers.
    """

    def __init__(self, expression: str, parts: Sequence[tuple[RewardTerm, Scorer]]) -> None:
        self._expression = expression
        self._parts = parts

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """Return one reward per sample, in order, or the failure of a part."""
        columns = await run_all(scorer.score(samples) for _, scorer in self._parts)
        return [self._sum(sample, row) for sample, *row in zip(samples, *columns, strict=True)]

    def _sum(self, sample: Sample, row: Sequence[Reward | RewardFailure]) -> Reward | RewardFailure:
        rewards: dict[str, float] = {}
        for (term, _), answer in zip(self._parts, row, strict=True):
            value = self._value(term, answer)
            if isinstance(value, RewardFailure):
                return value
            rewards[str(term)] = value
        # A copy, because the samples of a group share the metadata of their row.
        sample.metadata = {**sample.metadata, PARTS: rewards}
        total = _exact_sum((term.weight, rewards[str(term)]) for term, _ in self._parts)
        if not math.isfinite(total):
            return RewardFailure("invalid", f"{self._expression!r} of {rewards} is {total}; accepted: a finite number")
        return total

    def _value(self, term: RewardTerm, answer: Reward | RewardFailure) -> float | RewardFailure:
        if isinstance(answer, RewardFailure):
            return RewardFailure(answer.cause, f"part {term} of {self._expression!r}: {answer.error}", answer.lost)
        value = answer.get(term.key or "") if isinstance(answer, dict) else answer
        is_plain = isinstance(answer, dict) == (term.key is not None)
        if is_plain and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        accepted = "a finite number" if term.key is None else f"a table with a finite number {term.key!r}"
        names = f"; name one of them, such as {term.name}:{min(answer)}" if isinstance(answer, dict) and answer else ""
        return RewardFailure(
            "invalid", f"part {term} of {self._expression!r} returned {answer!r}; accepted: {accepted}{names}"
        )


def _exact_sum(products: Iterable[tuple[float, float]]) -> float:
    """Return the sum of products of decimals, rounded once: ``0.7*1 + 0.2*1 + 0.1*1`` is 1."""
    total = sum((Fraction(repr(weight)) * Fraction(repr(reward)) for weight, reward in products), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def part_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Return the mean reward of every part of a sum over the samples that have it, as ``prefix/PART``."""
    by_part: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        parts = cast(dict[str, float], sample.metadata.get(PARTS) or {})
        for part, reward in parts.items():
            by_part[part].append(reward)
    return {f"{prefix}/{part}": fmean(rewards) for part, rewards in sorted(by_part.items())}
