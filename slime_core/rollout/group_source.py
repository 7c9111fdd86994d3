"""Where the groups of a rollout come from. The sampler drives one source, and does not know which.

    Rollouts         what the sampler calls
    Batch            the rollout that is being collected
    PluginRollouts   a rollout source of a plugin; what it does not make, live rollouts keep

The other two are :class:`slime_core.rollout.live_rollouts.LiveRollouts`, the default, and
:class:`slime_core.rollout.recorded_rollouts.RecordedRollouts`, of a run that only trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slime_core.errors import PluginError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.plugins.contracts import DataSource, RolloutSource
from slime_core.plugins.discovery import PluginIdentity
from slime_core.rollout.collected_groups import CollectedGroups
from slime_core.rollout.group_collector import GroupCollector
from slime_core.rollout.guard import component_boundary
from slime_core.rollout.prompt_ledger import PendingGroups
from slime_core.rollout.staleness import Staleness
from slime_core.track.ledger import REQUEUED, STALE
from slime_core.types import PromptGroup, Sample

__all__ = ["GroupSource", "PluginRollouts", "RolloutBatch"]

OWN_STATE = "rollout_source"
"""Key of a plugin's rollout source in the state of the rollouts."""


class RolloutBatch:
    """A :class:`~slime_core.plugins.contracts.RolloutBatch`.

    Arguments:
        rollout: its number.
        harvest: receives the groups.
        prompts: groups that are too old go back there, where the run says so.
        staleness: the run's bound.
        collector: scores samples without a reward; None: all have one.
        generation: what generate functions are handed in a rollout for a sample.
    """

    def __init__(
        self,
        rollout: int,
        harvest: CollectedGroups,
        *,
        prompts: DataSource,
        staleness: Staleness,
        collector: GroupCollector | None,
        generation: Callable[[int, Sample], tuple[GenerateContext, SamplingParams]],
    ) -> None:
        self.harvest = harvest
        self._rollout, self._prompts = rollout, prompts
        self._staleness, self._collector = staleness, collector
        self._generation = generation

    @property
    def rollout(self) -> int:
        """Number of the rollout."""
        return self._rollout

    @property
    def prompts(self) -> DataSource:
        """The run's data source."""
        return self._prompts

    @property
    def wanted(self) -> int:
        """Groups that are to be kept."""
        return self.harvest.wanted

    @wanted.setter
    def wanted(self, count: int) -> None:
        self.harvest.wanted = count

    @property
    def missing(self) -> int:
        """Groups that are still to be kept."""
        return self.harvest.missing

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """What a generate function is handed for ``sample`` and its group.

        Raises:
            DataError: its row asks for sampling that does not exist or cannot be trained on.
        """
        return self._generation(self._rollout, sample)

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Score what has no reward, and :meth:`receive` the groups."""
        if self._collector is not None:
            await self._collector.reward_missing(groups)
        self.receive(groups)

    def receive(self, groups: Sequence[PromptGroup]) -> int:
        """Take finished, rewarded groups; returns how many of them were too old."""
        fresh, stale = self._staleness.split(groups, rollout=self._rollout)
        if self._staleness.stale == "requeue":
            self._prompts.put_back(stale)
        self.harvest.leave_out(stale, STALE if self._staleness.stale == "evict" else REQUEUED)
        self.harvest.take(fresh)
        return len(stale)


class GroupSource(Protocol):
    """What the sampler calls of the source of its rollouts, one call at a time, beside groups in flight."""

    @property
    def prompts(self) -> DataSource:
        """Where prompts are taken, and put back."""
        ...

    @property
    def is_replay(self) -> bool:
        """Whether rollouts are read that another run has generated and written down, so that nothing is written again
        and the speed of engines is not measured."""
        ...

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout``; returns further metrics of the rollout.

        Raises:
            RunError: too few groups are kept.
            SlimeError: what ended a group; or a saved rollout cannot be read.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """What generating ahead has done since this was last asked."""
        ...

    def published(self, version: int) -> None:
        """The engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: what ended a group in the meantime.
        """
        ...

    async def rest(self) -> None:
        """What was begun ahead of training has ended when this returns, so that engines can be measured.

        Raises:
            SlimeError: what ended a group.
        """
        ...

    def check(self) -> None:
        """Raise what has ended a group, if anything has."""
        ...

    def present(self) -> PendingGroups:
        """The groups that were taken from the prompts and that no rollout has taken yet."""
        ...

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, JSON-ready."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        ...

    async def close(self) -> None:
        """Nothing is in flight any more when this returns."""
        ...


class PluginRollouts:
    """Rollouts of a plugin's source.

    Arguments:
        source: makes the groups.
        name, plugin: the component and whose it is, for messages.
        live: has the prompts, and what a checkpoint of a live run holds.
    """

    is_replay = False

    def __init__(self, source: RolloutSource, *, name: str, plugin: PluginIdentity, live: GroupSource) -> None:
        self._source, self._name, self._plugin, self._live = source, name, plugin, live
        # A plugin's source makes rollouts when it is asked: what live rollouts have is only kept.
        self.metrics, self.published, self.rest = live.metrics, live.published, live.rest
        self.check, self.present, self.close = live.check, live.present, live.close

    @property
    def prompts(self) -> DataSource:
        """Where prompts are taken, and put back."""
        return self._live.prompts

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Let the source fill ``batch``.

        Raises:
            PluginError: it failed, or returned something else than metrics.
        """
        with component_boundary(self._plugin, f"rollout source {self._name!r}"):
            found: Any = await self._source.fill(batch)
        if not isinstance(found, Mapping) or not all(isinstance(value, int | float) for value in found.values()):
            raise PluginError(
                f"{self._plugin}: rollout source {self._name!r} returned {found!r:.80}; accepted is a dict of metrics, "
                f"name -> number.\nCorrect {self._plugin.distribution}."
            )
        return {str(name): float(value) for name, value in found.items()}

    def state(self) -> dict[str, Any]:
        """That of the live rollouts, and the source's own."""
        with component_boundary(self._plugin, f"rollout source {self._name!r}: state"):
            own = self._source.state()
        return {**self._live.state(), **({OWN_STATE: dict(own)} if own else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self._live.restore(state)
        if OWN_STATE in state:
            with component_boundary(self._plugin, f"rollout source {self._name!r}: restore"):
                self._source.restore(state[OWN_STATE])
