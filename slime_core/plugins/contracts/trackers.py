"""Where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from slime_core.plugins.contracts.run import RunView

__all__ = ["Tracker"]


class Tracker(Protocol):
    """Sends metrics somewhere: an observer, whose failure never ends a run; after three it is called no more."""

    def start(self, run: RunView) -> None:
        """The run begins, or resumes (``run.resumed_step``); its folder exists. Called once, before any metrics."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step.

        Steps rise, but for an evaluation that went on beside training: it is logged when it has ended, under the step
        that it measured.
        """
        ...

    def close(self, error: BaseException | None) -> None:
        """Flush and let go; called once, also when the run failed.

        Arguments:
            error: what ended the run; None: it reached its last rollout.
        """
        ...
