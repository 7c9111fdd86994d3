"""Where metrics and samples go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol, runtime_checkable

from slime_core.plugins.contracts.run import RunView
from slime_core.types import SampleRecord

__all__ = ["SampleTracker", "Tracker"]


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


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also sees the samples; the driver reads them only for a tracker that has this method."""

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterable[SampleRecord]) -> None:
        """The samples of one rollout or of one evaluation, as the run wrote them down.

        Called after :meth:`log` of the same step, or when an evaluation of the weights of ``step`` has ended. The rows
        are read from disk one at a time while they are iterated; an evaluation has those of all its sets.
        """
        ...
