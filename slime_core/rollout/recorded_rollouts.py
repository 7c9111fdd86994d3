"""Rollouts of a run that only trains: they are read where another run saved them, and nothing is generated.

They join the way of a live rollout where the samples of that one were saved, after rewards and sample transforms. The
rest is the same code: hooks, advantages, balance and packing. The same samples under the same settings thus become the
same shards, bit for bit.
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
        files: with ``{rollout_id}`` for the number.
        share: of the groups of each rollout that is trained; None: all.
    """

    is_replay = True

    def __init__(self, files: Path, *, share: float | None = None) -> None:
        self._files, self._share = RolloutFiles(files, "load_debug_rollout_data"), share
        self.prompts = _Place()

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Read rollout ``batch.rollout``.

        Raises:
            DataError: its file is missing or malformed.
        """
        found = self._files.read(batch.rollout).subsampled(self._share)
        self.prompts.cursor = found.cursor
        groups = [*found.groups, *found.lost_groups]
        batch.wanted = len(groups)
        batch.harvest.take(groups)
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Nothing is generated."""
        return {}

    def published(self, version: int) -> None:
        """No engine serves anything."""

    async def rest(self) -> None:
        """Nothing was begun."""

    def check(self) -> None:
        """Nothing can have failed."""

    def present(self) -> PendingGroups:
        """Nothing is taken before it is trained."""
        return PendingGroups()

    def state(self) -> dict[str, Any]:
        """That of the live run behind the rollout that was read last."""
        return self.prompts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self.prompts.restore(state)

    async def close(self) -> None:
        """Nothing was started."""


class _Place(DataSource):
    """Where the data source of the live run stood, so that a live run can continue from what is trained here."""

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}

    def next_groups(self, n: int) -> list[PromptGroup]:
        raise AssertionError("rollouts are read; nothing asks for prompts")

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Recorded groups come again by their file only."""

    def state(self) -> dict[str, Any]:
        return self.cursor

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = dict(state)

    def __len__(self) -> int:
        return 0
