"""The default group source: groups are generated now, by the components of the run.

group_scheduler  groups in flight, for this rollout and later ones (:mod:`slime_core.rollout.group_scheduler`)
group_collector  generates and rewards one group (:mod:`slime_core.rollout.group_collector`)
staleness        which groups are too old to be trained (:mod:`slime_core.rollout.staleness`)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.plugins.contracts import DataSource
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.rollout.group_collector import GroupCollector, mark_missing_failed
from slime_core.rollout.group_scheduler import AsyncPolicy, GroupScheduler
from slime_core.rollout.group_source import RolloutBatch
from slime_core.rollout.prompt_ledger import PendingGroups
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.rollout.sampling_params import train_sampling
from slime_core.rollout.staleness import Staleness, stale_weights_error
from slime_core.types import PromptGroup, Status

__all__ = ["LiveRollouts"]

MAX_STALE_ROUNDS = 100
"""Consecutive rounds that returned groups which were too old; over-sampling leaves only a few such groups behind."""


class LiveRollouts:
    """A :class:`~slime_core.rollout.group_source.GroupSource`, and the
    :class:`~slime_core.rollout.group_scheduler.GroupWork` of its scheduler.

    Arguments:
        config: the run's settings.
        components: what groups are generated with.
        prompts: of the run.
        collector: generates and rewards.
        staleness: the run's bound.
        hooks: ``slime_before_rollout`` receives the groups that start.
    """

    is_replay = False

    def __init__(
        self,
        config: RunConfig,
        components: SamplerComponents,
        *,
        prompts: DataSource,
        collector: GroupCollector,
        staleness: Staleness,
        hooks: LifecycleHooks,
    ) -> None:
        self.prompts = prompts
        self._max_refills = config.rollout.rollout_max_refills
        self._components = components
        self._collector = collector
        self._staleness = staleness
        self._hooks = hooks
        self._num_restarted = 0  # aborted samples whose tokens were too old to be resumed
        self._sampling = train_sampling(config, end_ids=components.encoder.end_ids)
        self._scheduler = GroupScheduler(prompts, work=self, policy=AsyncPolicy.of(config))

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add groups until the batch has enough. Groups that transforms drop are replaced (dynamic sampling, DAPO
        2503.14476, section 3.2) in at most ``rollout_max_refills`` rounds. Groups that are too old, which over-sampling
        leaves behind, are always replaced: their age is no property of the prompts.

        Raises:
            RunError: too few groups are kept.
            SlimeError: a group failed, whichever rollout it was admitted for.
        """
        groups, rollout = batch.groups, batch.rollout
        num_stale, stale_rounds = await self._round(batch, batch.missing), 0
        while batch.missing and (num_stale or groups.refills < self._max_refills):
            groups.refills += not num_stale
            stale_rounds = stale_rounds + 1 if num_stale else 0
            if stale_rounds > MAX_STALE_ROUNDS:
                raise stale_weights_error(groups.stale, rollout=rollout)
            num_stale = await self._round(batch, min(batch.missing, num_stale) or batch.missing)
        await self._scheduler.abort_in_flight()
        if batch.missing and self._max_refills:
            raise RunError(f"rollout {rollout}: {groups.shortage(self._max_refills)}")
        return {}

    async def _round(self, batch: RolloutBatch, count: int) -> int:
        return batch.receive(await self._scheduler.take(batch.rollout, count))

    # --- Called by the scheduler -------------------------------------------------------------------------------------

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> None:
        """Reset or resume the samples of each group, and call ``slime_before_rollout``."""
        for group in groups:
            is_stale = self._staleness.refuses(group, rollout=rollout)
            self._num_restarted += is_stale * sum(sample.status is Status.ABORTED for sample in group)
            self._collector.prepare_group(group, is_stale=is_stale)
        self._hooks.call("slime_before_rollout", rollout=rollout, groups=groups)

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        """Generate and reward ``group``; samples that the generate function did not return come back as failed."""
        context = self._components.context(rollout, evaluation=False)
        given = list(group)
        (collected,) = await self._collector.collect(context, [group], self._sampling)
        return [*collected, *mark_missing_failed(given, collected)]

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        """Abort the client's requests while the context lasts."""
        return self._components.client.aborting()

    # --- Called by the sampler ---------------------------------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """How full the scheduler's buffer is, and how many aborted samples were too old to be resumed."""
        num_restarted, self._num_restarted = self._num_restarted, 0
        found = {"rollout/staleness/begun_anew": float(num_restarted)} if num_restarted else {}
        return found | self._scheduler.metrics()

    def published(self, version: int) -> None:
        """The engines serve ``version``; more groups may start."""
        self._scheduler.published(version)

    async def drain(self) -> None:
        """Wait until no group is in flight."""
        await self._scheduler.drain()

    def raise_failure(self) -> None:
        """Raise the exception of a group that failed, if there is one."""
        self._scheduler.raise_failure()

    def pending_groups(self) -> PendingGroups:
        """The groups in flight, and the finished ones that no rollout has taken."""
        return self._scheduler.pending_groups()

    def state(self) -> dict[str, Any]:
        """The prompts' state, and every group that no rollout has taken yet."""
        return self._scheduler.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self._scheduler.restore(state)

    async def close(self) -> None:
        """Cancel what is in flight, and wait for it."""
        await self._scheduler.close()
