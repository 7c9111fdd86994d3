"""Where the groups of a rollout come from: the sampler calls one of three sources through one Protocol.

    GroupSource      the Protocol
    RolloutBatch     the batch that a source fills
    PluginRollouts   the source of a run with ``--rollout-source``: a plugin's rollout source generates

The other two sources are :class:`slime_core.rollout.live_rollouts.LiveRollouts`, the default, and
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
    """The batch that a source fills; implements :class:`slime_core.plugins.contracts.RolloutBatch`.

    Arguments:
        rollout: its number.
        groups: receives the groups.
        prompts: receives groups that are too old, where ``--stale-samples`` is ``requeue``.
        staleness: the run's bound.
        collector: scores samples without a reward; None: all samples have one.
        generation: rollout and sample -> the arguments of its generate function.
    """

    def __init__(
        self,
        rollout: int,
        groups: CollectedGroups,
        *,
        prompts: DataSource,
        staleness: Staleness,
        collector: GroupCollector | None,
        generation: Callable[[int, Sample], tuple[GenerateContext, SamplingParams]],
    ) -> None:
        self.groups = groups
        self._rollout = rollout
        self._prompts = prompts
        self._staleness = staleness
        self._collector = collector
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
        """Groups that the batch needs."""
        return self.groups.wanted

    @wanted.setter
    def wanted(self, count: int) -> None:
        self.groups.wanted = count

    @property
    def missing(self) -> int:
        """Groups that the batch still needs."""
        return self.groups.missing

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """The arguments of the generate function for ``sample`` and its group.

        Raises:
            DataError: the sample's row requests sampling that does not exist or cannot be trained on.
        """
        return self._generation(self._rollout, sample)

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Score samples without a reward, then :meth:`receive` the groups."""
        if self._collector is not None:
            await self._collector.reward_missing(groups)
        self.receive(groups)

    def receive(self, groups: Sequence[PromptGroup]) -> int:
        """Sort finished, rewarded groups into trainable and stale ones; returns how many are stale."""
        fresh, stale = self._staleness.split(groups, rollout=self._rollout)
        if self._staleness.stale == "requeue":
            self._prompts.put_back(stale)
        self.groups.leave_out(stale, STALE if self._staleness.stale == "evict" else REQUEUED)
        self.groups.take(fresh)
        return len(stale)


class GroupSource(Protocol):
    """A source of groups as the sampler calls it: one call at a time, while groups may be in flight."""

    @property
    def prompts(self) -> DataSource:
        """The data source that prompts are taken from and put back to."""
        ...

    @property
    def is_replay(self) -> bool:
        """Whether rollouts are read from files of another run: the sampler then writes no samples and measures no
        throughput."""
        ...

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout``; returns additional metrics of the rollout.

        Raises:
            RunError: too few groups are kept.
            SlimeError: a group failed, or a saved rollout cannot be read.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics of groups in flight since the last call."""
        ...

    def published(self, version: int) -> None:
        """The engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: a group has failed.
        """
        ...

    async def drain(self) -> None:
        """Wait until no group is in flight, so that an evaluation has the engines to itself.

        Raises:
            SlimeError: a group failed.
        """
        ...

    def raise_failure(self) -> None:
        """Raise the exception of a group that failed, if there is one."""
        ...

    def pending_groups(self) -> PendingGroups:
        """The groups that were taken from the prompts and that no rollout has taken."""
        ...

    def state(self) -> dict[str, Any]:
        """The state that :meth:`restore` needs, JSON-ready."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight, and wait for it."""
        ...


class PluginRollouts:
    """Calls a plugin's rollout source.

    Arguments:
        source: fills batches.
        name, plugin: the component and its plugin, for messages.
        live: owns the prompts and their state.
    """

    is_replay = False

    def __init__(self, source: RolloutSource, *, name: str, plugin: PluginIdentity, live: GroupSource) -> None:
        self._source = source
        self._name = name
        self._plugin = plugin
        self._live = live
        # A plugin's source has nothing in flight between rollouts, so the rest of the Protocol is the live source's.
        self.metrics = live.metrics
        self.published = live.published
        self.drain = live.drain
        self.raise_failure = live.raise_failure
        self.pending_groups = live.pending_groups
        self.close = live.close

    @property
    def prompts(self) -> DataSource:
        """The data source that prompts are taken from and put back to."""
        return self._live.prompts

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Let the source fill ``batch``.

        Raises:
            PluginError: the source failed, or returned no metrics.
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
        """The state of the live rollouts, and that of the plugin's source."""
        with component_boundary(self._plugin, f"rollout source {self._name!r}: state"):
            own = self._source.state()
        return {**self._live.state(), **({OWN_STATE: dict(own)} if own else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self._live.restore(state)
        if OWN_STATE in state:
            with component_boundary(self._plugin, f"rollout source {self._name!r}: restore"):
                self._source.restore(state[OWN_STATE])
