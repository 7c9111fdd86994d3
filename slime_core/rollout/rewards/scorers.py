"""Runs reward models: in the pool of reward processes, or in the sampler where their traits say that they cannot hang.

Either way each sample gets a reward or a :class:`~slime_core.types.RewardFailure`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.config.reward_sum import reward_terms
from slime_core.errors import RunError, SlimeError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.rollout.rewards.pool import RewardPool, RewardPoolSettings
from slime_core.rollout.rewards.reward_sum import Scorer, WeightedSum
from slime_core.rollout.sampler_records import SamplerSettings
from slime_core.types import Reward, RewardFailure, Sample

__all__ = ["InProcessScorer", "PoolScorer", "RewardScorers", "default_num_workers", "make_pool"]

FEWEST_WORKERS, MOST_WORKERS = 2, 16
"""Two, so that one can hang; more than 16 cost memory and help only rewards that compute for long."""


class RewardScorers:
    """Returns the scorer of a reward model by name; all that run in processes share one pool.

    Arguments:
        registry: knows the traits of each reward model.
        make: makes the component of a name, for those that run in the sampler.
        pool: for the others; None: there is no manifest that a process could load, so all run in the sampler.
    """

    def __init__(self, registry: Registry, *, make: Callable[[str], Any], pool: RewardPool | None) -> None:
        self._registry = registry
        self._make = make
        self._pool = pool
        self._made: dict[str, Scorer] = {}

    def __call__(self, name: str) -> Scorer:
        """The scorer of one reward model, or of a weighted sum; each model is made once."""
        terms = reward_terms(name)
        return self._one(name) if terms is None else WeightedSum(name, [(term, self._one(term.name)) for term in terms])

    def _one(self, name: str) -> Scorer:
        if name not in self._made:
            self._made[name] = self._make_one(name)
        return self._made[name]

    def _make_one(self, name: str) -> Scorer:
        traits: Any = self._registry.find(Kind.REWARD_MODEL, name).traits
        if self._pool is None or not traits.isolated:
            return InProcessScorer(name, self._make(name))
        return PoolScorer(name, self._pool, together=traits.scope == "group")

    async def close(self) -> None:
        """End every process."""
        if self._pool is not None:
            await self._pool.close()


def default_num_workers(num_cores: int) -> int:
    """Number of reward processes on a machine with ``num_cores`` cores, which engines and learner use too."""
    return max(FEWEST_WORKERS, min(MOST_WORKERS, num_cores // 2))


def make_pool(manifest: Manifest | None, settings: SamplerSettings) -> RewardPool | None:
    """The pool of a run; None without a manifest. It starts its first process with the first call."""
    if manifest is None:
        return None
    rollout = settings.config.rollout
    return RewardPool(
        RewardPoolSettings(
            manifest.to_json(),
            settings.options,
            settings.run,
            num_workers=rollout.reward_num_workers or default_num_workers(len(os.sched_getaffinity(0))),
            timeout_s=rollout.reward_timeout_s,
            memory_gib=rollout.reward_memory_gib,
            log_file=settings.rewards_log,
        )
    )


class InProcessScorer:
    """A reward model that runs in the sampler; an exception ends the run."""

    def __init__(self, name: str, component: Any) -> None:
        self._name, self._component = name, component

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward per sample, in order; not yet validated.

        Raises:
            PluginError: it failed.
            RunError: it returned another number of rewards.
        """
        with boundary(f"reward model {self._name!r}", "scoring", locate=True, passes=(SlimeError,)):
            rewards = list(await self._component.score(samples))
        if len(rewards) != len(samples):
            raise RunError(f"reward model {self._name!r} returned {len(rewards)} rewards for {len(samples)} samples")
        return rewards


class PoolScorer:
    """A reward model in the pool; ``together``: it must get all samples of a call at once."""

    def __init__(self, name: str, pool: RewardPool, *, together: bool) -> None:
        self._name, self._pool, self._together = name, pool, together

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward or failure per sample, in order."""
        return await self._pool.score(self._name, samples, together=self._together) if samples else []
