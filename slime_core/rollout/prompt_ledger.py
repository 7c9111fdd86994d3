"""The ledger of a run that goes on: what the sampler tells it, what it checks after every rollout, and what of it is in
a checkpoint. How it counts is in :mod:`slime_core.track.ledger`.

A rollout is closed once its file of samples is written; then everything on disk is counted, and what is open must be in
the sampler's hands. A checkpoint keeps how far the journal had come and which groups were in whose hands, so that a
resumed run forgets what it is going to do again, and counts all files before it once more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.track.ledger import Groups, Journal, Recount

__all__ = ["LEDGER", "PendingGroups", "PromptLedger"]

LEDGER = "ledger"
"""Key of a sampler's state in a checkpoint."""


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """Groups in the sampler's hands: number -> numbers of their samples.

    Arguments:
        in_flight: begun and not finished.
        held: finished and waiting for a rollout, or ended with a part of their responses.
    """

    in_flight: Groups = field(default_factory=dict)
    held: Groups = field(default_factory=dict)

    @property
    def groups(self) -> dict[int, Any]:
        """All of them."""
        return {**self.in_flight, **self.held}


class PromptLedger:
    """Accounts for every prompt group of a run.

    Arguments:
        folder: of samples; None: there is no ledger.
        is_strict: everything goes through the sampler's hands. False: a function of the run takes prompts, keeps them
            and makes samples as it likes, so what is open may be with it.
    """

    def __init__(self, folder: Path | None, *, is_strict: bool = True) -> None:
        self.journal = Journal(folder)
        self._folder, self._is_strict = folder, is_strict
        self._recount = None if folder is None else Recount(folder)

    def close(self, rollout: int, present: PendingGroups) -> dict[str, float]:
        """Count what the files say now that those of ``rollout`` are written; returns ``ledger/...``.

        Raises:
            RunError: a group is lost, or ended twice; names it.
        """
        if self._recount is None:
            return {}
        begun_s = time.monotonic()
        self.journal.closed(rollout, is_strict=self._is_strict)
        self._recount.read()
        if self._is_strict:
            self._recount.check(present.groups)
        held = len(present.held) if self._is_strict else len(self._recount.open)
        metrics = self._recount.metrics(held=held, in_flight=len(present.in_flight))
        return {**metrics, "perf/ledger_time": time.monotonic() - begun_s}

    def state(self, present: PendingGroups) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-ready."""
        groups = {"in_flight": present.in_flight, "held": present.held}
        parts = {name: [[group, list(ids)] for group, ids in found.items()] for name, found in groups.items()}
        position = self.journal.position()
        return {"journal": position, "mark": self.journal.mark(position), **parts}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Forget what came after ``state()`` was taken; None: of a run that kept no ledger."""
        state = state or {}
        held = {group: ids for name in ("in_flight", "held") for group, ids in state.get(name, [])}
        self.journal.rewind(state.get("journal"), held=held, mark=state.get("mark"))
        self._recount = None if self._folder is None else Recount(self._folder)
