"""Rollouts that are generated now: groups in flight, each generated and rewarded by the run's components.

production  groups in flight, for this rollout and those after it (:mod:`slime_core.rollout.group_scheduler`)
collect     one group generated, rewarded as it finishes (:mod:`slime_core.rollout.group_collector`)
staleness   which of them are too old to be trained (:mod:`slime_core.rollout.staleness`)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.plugins.contracts import DataSource
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.rollout.async_policy import AsyncPolicy
from slime_core.rollout.group_collector import GroupCollector, mark_missing_failed
from slime_core.rollout.group_scheduler import GroupScheduler
from slime_core.rollout.group_source import RolloutBatch
from slime_core.rollout.prompt_ledger import PendingGroups
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.rollout.sampling_params import train_sampling
from slime_core.rollout.staleness import Staleness, stale_weights_error
from slime_core.types import PromptGroup, Status

__all__ = ["LiveRollouts"]

MOST_OLD_ROUNDS = 100
"""One after the other, of which some groups were too old; over-sampling leaves no more than a few."""


class LiveRollouts:
    """The default of :class:`~slime_core.rollout.group_source.GroupSource`.

    Arguments:
        config: the run's settings.
        parts: what it generates with.
        prompts: of the run.
        collector: generates and rewards.
        staleness: the run's bound.
        hooks: ``slime_before_rollout`` sees the groups that are begun.
    """

    is_replay = False

    def __init__(
        self,
        config: RunConfig,
        parts: SamplerComponents,
        *,
        prompts: DataSource,
        collector: GroupCollector,
        staleness: Staleness,
        hooks: LifecycleHooks,
    ) -> None:
        self.prompts = prompts
        self._limit, self._parts, self._collector = config.rollout.rollout_max_refills, parts, collector
        self._staleness, self._hooks, self._begun_anew = staleness, hooks, 0
        self._sampling = train_sampling(config, end_ids=parts.encoder.end_ids)
        pace = AsyncPolicy.of(config)
        self._production = GroupScheduler(
            prompts, prepare=self._prepare, make=self._make, pace=pace, ends=self._ends_requests
        )

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add groups until enough are kept. Other prompts take the place of groups that transforms drop (dynamic
        sampling, DAPO 2503.14476, section 3.2), in as many rounds as the run allows; what was too old, as over-sampling
        leaves it, is always replaced: it is the sampler's own doing.

        Raises:
            RunError: too few groups are kept.
            SlimeError: what ended a group, whichever rollout it was begun for.
        """
        harvest, rollout = batch.harvest, batch.rollout
        num_old, rounds = await self._round(batch, batch.missing), 0
        while batch.missing and (num_old or harvest.refills < self._limit):
            harvest.refills += not num_old
            rounds = rounds + 1 if num_old else 0
            if rounds > MOST_OLD_ROUNDS:
                raise stale_weights_error(harvest.stale, rollout=rollout)
            num_old = await self._round(batch, min(batch.missing, num_old) or batch.missing)
        await self._production.settle()
        if batch.missing and self._limit:
            raise RunError(f"rollout {rollout}: {harvest.shortage(self._limit)}")
        return {}

    async def _round(self, batch: RolloutBatch, count: int) -> int:
        return batch.receive(await self._production.take(batch.rollout, count))

    def _prepare(self, rollout: int, groups: list[PromptGroup]) -> None:
        for group in groups:
            too_old = self._staleness.refuses(group, rollout=rollout)
            self._begun_anew += too_old * sum(sample.status is Status.ABORTED for sample in group)
            self._collector.prepare_group(group, too_old=too_old)
        self._hooks.call("slime_before_rollout", rollout=rollout, groups=groups)

    async def _make(self, rollout: int, group: PromptGroup) -> PromptGroup:
        context = self._parts.context(rollout, evaluation=False)
        given = list(group)
        (made,) = await self._collector.collect(context, [group], self._sampling)
        return [*made, *mark_missing_failed(given, made)]

    def _ends_requests(self) -> AbstractAsyncContextManager[None]:
        return self._parts.client.aborting()

    # --- What the groups in flight say -------------------------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """How full the buffer is, and what began anew because it was too old."""
        begun_anew, self._begun_anew = self._begun_anew, 0
        found = {"rollout/staleness/begun_anew": float(begun_anew)} if begun_anew else {}
        return found | self._production.metrics()

    def published(self, version: int) -> None:
        """The engines serve ``version``; more groups may begin."""
        self._production.published(version)

    async def rest(self) -> None:
        """What was begun has ended when this returns."""
        await self._production.rest()

    def check(self) -> None:
        """Raise what has ended a group, if anything has."""
        self._production.check()

    def present(self) -> PendingGroups:
        """The groups in flight, and those that are finished and wait."""
        return self._production.present()

    def state(self) -> dict[str, Any]:
        """The prompts' state, and every group that no rollout has taken yet."""
        return self._production.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self._production.restore(state)

    async def close(self) -> None:
        """Nothing is in flight any more when this returns."""
        await self._production.close()
