"""Where a reward model runs: in a process that can be killed, or inside the sampler where its traits say that it cannot
hang.

Either way it gives each sample a reward or a :class:`~slime_core.types.RewardFailure`.
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
from slime_core.rollout.rewards.weighted import Scorer, WeightedSum
from slime_core.rollout.sampler_records import SamplerSettings
from slime_core.types import Reward, RewardFailure, Sample

__all__ = ["InPool", "InSampler", "Rewarding", "num_workers_of", "pool_of"]

FEWEST_WORKERS, MOST_WORKERS = 2, 16
"""One that hangs must leave another; more are worth their memory only to rewards that compute for long."""


class Rewarding:
    """Makes reward models by name; all that run in processes share one pool.

    Arguments:
        registry: says where each runs.
        make: a component by its name, made with its plugin's options, for those that run here.
        pool: for the others; None: there is no manifest that a process could load, so all run here.
    """

    def __init__(self, registry: Registry, *, make: Callable[[str], Any], pool: RewardPool | None) -> None:
        self._registry, self._make, self._pool = registry, make, pool
        self._made: dict[str, Scorer] = {}

    def __call__(self, name: str) -> Scorer:
        """The reward model of that name, or the weighted sum of several; parts of sums are made once."""
        terms = reward_terms(name)
        return self._one(name) if terms is None else WeightedSum(name, [(term, self._one(term.name)) for term in terms])

    def _one(self, name: str) -> Scorer:
        if name not in self._made:
            self._made[name] = self._make_one(name)
        return self._made[name]

    def _make_one(self, name: str) -> Scorer:
        traits: Any = self._registry.find(Kind.REWARD_MODEL, name).traits
        if self._pool is None or traits.runs_in == "sampler":
            return InSampler(name, self._make(name))
        return InPool(name, self._pool, together=traits.scope == "group")

    async def close(self) -> None:
        """End every process."""
        if self._pool is not None:
            await self._pool.close()


def num_workers_of(num_cores: int) -> int:
    """Processes of rewards on a machine with so many cores, which others use too."""
    return max(FEWEST_WORKERS, min(MOST_WORKERS, num_cores // 2))


def pool_of(manifest: Manifest | None, settings: SamplerSettings) -> RewardPool | None:
    """The pool of a run; None without a manifest. It starts no process before a reward is asked for."""
    if manifest is None:
        return None
    rollout = settings.config.rollout
    return RewardPool(
        RewardPoolSettings(
            manifest.to_json(),
            settings.options,
            settings.run,
            num_workers=rollout.reward_num_workers or num_workers_of(len(os.sched_getaffinity(0))),
            timeout_s=rollout.reward_timeout_s,
            memory_gib=rollout.reward_memory_gib,
            log_file=settings.rewards_log,
        )
    )


class InSampler:
    """A reward model that runs here; what it raises ends the run."""

    def __init__(self, name: str, component: Any) -> None:
        self._name, self._component = name, component

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward a sample, in order; not yet checked.

        Raises:
            PluginError: it failed.
            RunError: it returned too few or too many.
        """
        with boundary(f"reward model {self._name!r}", "scoring", locate=True, passes=(SlimeError,)):
            rewards = list(await self._component.score(samples))
        if len(rewards) != len(samples):
            raise RunError(f"reward model {self._name!r} returned {len(rewards)} rewards for {len(samples)} samples")
        return rewards


class InPool:
    """A reward model in processes of its own; ``together``: it has to see all samples of a call at once."""

    def __init__(self, name: str, pool: RewardPool, *, together: bool) -> None:
        self._name, self._pool, self._together = name, pool, together

    async def score(self, samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
        """One reward or failure a sample, in order."""
        return await self._pool.score(self._name, samples, together=self._together) if samples else []
