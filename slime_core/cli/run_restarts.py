"""Decides whether a run restarts after one of its processes, a node or Ray died, and from which checkpoint.

A restart is what ``slime run --load RUN_FOLDER`` does, in the same command, once everything of the run has ended.
Before the first checkpoint the run starts again from its beginning, in the same folder.

Three restarts are the default: a run survives a cause that has passed (a preempted node, a neighbour that took the
memory), and a cause that stays (a rollout that does not fit) ends it within minutes. A new checkpoint resets the count,
so a run of weeks survives any number of passing causes, and one without progress ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.checkpoint.folder import Checkpoint, newest
from slime_core.errors import RunError

if TYPE_CHECKING:
    from slime_core.config.load import Resolved

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a restart; doubles from one to the next."""


@dataclass(slots=True)
class RunRestarts:
    """Restarts of a run since its newest checkpoint.

    Arguments:
        limit: restarts without a new checkpoint, after which the next death ends the run.
        total: rollouts of the run.
        sleep: waits for so many seconds.
    """

    limit: int
    total: int
    sleep: Callable[[float], None] = time.sleep
    _count: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)

    def after(self, death: RunError, resolved: Resolved, folder: Path) -> Resolved:
        """The settings of the next start, after a pause.

        Arguments:
            death: what ended the run.
            resolved: the settings that it had.
            folder: of the run.

        Raises:
            RunError: ``death``, with the next step: there were too many, or nothing is left to train.
        """
        found = newest(folder / "checkpoints")
        step = 0 if found is None else found.state.step
        self._count = 0 if step > self._step else self._count
        self._step = step
        if step >= self.total or self._count >= self.limit:
            raise type(death)(f"{death}\n{self._ending(found, folder)}") from death
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._count)
        self._count += 1
        start = f"continues from {found.path.name}" if found else "starts from its beginning, as it has no checkpoint"
        print(
            f"slime: {death}\nslime: restart {self._count} of {self.limit} in {pause_s:g} s: the run {start}. "
            f"{self.limit - self._count} restarts are left until the next checkpoint (--max-restarts).",
            file=sys.stderr,
            flush=True,
        )
        self.sleep(pause_s)
        return _in_folder(resolved, folder, found)

    def _ending(self, found: Checkpoint | None, folder: Path) -> str:
        if found is not None and found.state.step >= self.total:
            return f"All rollouts are trained and saved in {found.path}; measure them with: slime eval {folder}"
        next_step = f"Continue from step {self._step} with --load {folder}." if found else "It has no checkpoint yet."
        return f"The run ends after {self._count} restarts without a new checkpoint (--max-restarts). {next_step}"


def _in_folder(resolved: Resolved, folder: Path, found: Checkpoint | None) -> Resolved:
    """``resolved`` for a start in ``folder`` from its newest checkpoint; None: from where the run started before."""
    config = resolved.config
    load = config.model.load if found is None else folder
    model = config.model.model_copy(update={"load": load})
    run = config.run.model_copy(update={"output_dir": folder})
    return replace(resolved, config=config.model_copy(update={"model": model, "run": run}))
