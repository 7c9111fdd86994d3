"""Three sources of the groups of a rollout; the sampler calls them through one Protocol.

    GroupSource        the Protocol
    PluginRollouts     with ``--rollout-source``: a plugin's rollout source fills the batch
    RecordedRollouts   train-only: groups are read from files that another run saved

The default, :class:`slime_core.rollout.group_scheduler.LiveRollouts`, generates groups now.

A recorded rollout was saved after rewards and sample transforms. From there on it runs the same code as a live one:
hooks, advantages, balancing and packing. The same samples under the same settings become the same shards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_core.errors import PluginError
from slime_core.plugins.contracts import DataSource, RolloutSource
from slime_core.plugins.discovery import PluginIdentity
from slime_core.rollout.components import component_boundary
from slime_core.rollout.rollout_batch import RolloutBatch
from slime_core.rollout.rollout_files import RolloutFiles
from slime_core.track.ledger import PendingGroups
from slime_core.types import PromptGroup

OWN_STATE = "rollout_source"
"""Key of a plugin's rollout source in the state of the rollouts."""


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


class RecordedRollouts:
    """A :class:`~slime_core.rollout.group_source.GroupSource` of saved files. No component that generates or rewards is
    made, and no sample transform: their work is in the files.

    Arguments:
        files: path with ``{rollout_id}`` for the number of the rollout.
        share: fraction of the groups of each rollout that is trained; None: all.
    """

    is_replay = True

    def __init__(self, files: Path, *, share: float | None = None) -> None:
        self._files = RolloutFiles(files, "load_debug_rollout_data")
        self._share = share
        self.prompts = _SavedCursor()

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Read rollout ``batch.rollout``.

        Raises:
            DataError: its file is missing or malformed.
        """
        found = self._files.read(batch.rollout).subsampled(self._share)
        self.prompts.cursor = found.cursor
        groups = [*found.groups, *found.lost_groups]
        batch.wanted = len(groups)
        batch.groups.take(groups)
        return {}

    def metrics(self) -> Mapping[str, float]:
        """No metrics: nothing is generated."""
        return {}

    def published(self, version: int) -> None:
        """Does nothing: there are no engines."""

    async def drain(self) -> None:
        """Does nothing: no group is in flight."""

    def raise_failure(self) -> None:
        """Does nothing: there are no tasks that could fail."""

    def pending_groups(self) -> PendingGroups:
        """None: groups are read when they are trained."""
        return PendingGroups()

    def state(self) -> dict[str, Any]:
        """The cursor that the live run had after the rollout that was read last."""
        return self.prompts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self.prompts.restore(state)

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""


class _SavedCursor(DataSource):
    """Carries the data cursor of the run that saved the rollouts, so that a live run can resume from this one."""

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}

    def next_groups(self, n: int) -> list[PromptGroup]:
        raise AssertionError("a recorded run takes no prompts")

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Does nothing: groups are read from their file."""

    def state(self) -> dict[str, Any]:
        return self.cursor

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = dict(state)

    def __len__(self) -> int:
        return 0
