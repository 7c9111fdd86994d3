"""The group source of a train-only run: it reads rollouts that another run saved, and generates nothing.

Rollouts were saved after rewards and sample transforms; from there on a recorded and a live rollout run the same code:
hooks, advantages, balancing and packing. The same samples under the same settings become the same shards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.plugins.contracts import DataSource
from slime_core.prompts.recorded import RolloutFiles
from slime_core.rollout.group_source import RolloutBatch
from slime_core.rollout.prompt_ledger import PendingGroups
from slime_core.types import PromptGroup

__all__ = ["RecordedRollouts"]


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
