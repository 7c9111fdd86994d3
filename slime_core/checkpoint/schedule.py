"""When a run saves, and which checkpoints it keeps."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from slime_core.checkpoint.folder import by_step
from slime_core.config.schema import RunConfig

TEMPORARY = "temporary"
"""Empty file in a checkpoint that the next one replaces."""


def is_due(interval: int | None, count: int) -> bool:
    """Whether something that happens every ``interval`` steps happens after ``count`` steps; None and 0: never."""
    return bool(interval) and count % int(interval or 1) == 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints of a run stay on disk.

    Those of ``interval`` and the last one of the run stay, as far as ``last`` and ``every`` say; others, which a time
    or SIGTERM asked for, only until the next one is complete.

    Arguments:
        interval: rollouts from one to the next; None: none but the last.
        total: rollouts of the run.
        last: how many of them stay; None: all.
        every: those whose number of rollouts this divides stay however old they are; None: none.
    """

    interval: int | None = None
    total: int = 0
    last: int | None = None
    every: int | None = None

    def mark(self, draft: Path, step: int) -> None:
        """Say in the checkpoint of ``step`` whether the next one replaces it."""
        if not is_due(self.interval, step) and step != self.total:
            (draft / TEMPORARY).touch()

    def tidy(self, folder: Path, *, newest: int) -> None:
        """Remove what does not stay, once the checkpoint of step ``newest`` is complete.

        A checkpoint is renamed before it is removed, so that nothing takes a part of it for a checkpoint. What cannot
        be removed stays.
        """
        older = {step: path for step, path in by_step(folder).items() if step < newest}
        temporary = [path for path in older.values() if (path / TEMPORARY).exists()]
        kept = sorted(step for step, path in older.items() if path not in temporary)
        if not (folder / f"step-{newest:06d}" / TEMPORARY).exists():
            kept.append(newest)
        surplus = [] if self.last is None else kept[: -self.last]
        for path in [*temporary, *(older[step] for step in surplus if not is_due(self.every, step))]:
            removed = path.with_name(f".removed-{path.name}")
            try:
                path.rename(removed)
            except OSError:
                continue
            shutil.rmtree(removed, ignore_errors=True)


class SaveClock:
    """Says when to save: every so many steps, every so many minutes, and after the last step; and when to wait for it.

    Attributes:
        total: number of steps of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.total = config.rollout.num_rollout
        self._interval = config.checkpoint.save_interval
        self._minutes = config.checkpoint.save_interval_minutes
        self._is_async = config.checkpoint.async_save
        self._last_s = time.monotonic()

    def waits_after(self, step: int) -> bool:
        """Whether training waits until the checkpoint after ``step`` steps is on disk."""
        return not self._is_async or step == self.total

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step`` steps; if so, the minutes to the next one count from here."""
        is_late = self._minutes is not None and time.monotonic() - self._last_s >= 60 * self._minutes
        found = is_due(self._interval, step) or step == self.total or is_late
        self._last_s = time.monotonic() if found else self._last_s
        return found
