"""Where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Tracker"]


class Tracker(Protocol):
    """Sends metrics somewhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step.

        Steps rise, but for an evaluation that went on beside training: it is logged when it has ended, under the step
        that it measured.
        """
        ...

    def close(self) -> None:
        """Flush and let go; called once, also when the run failed."""
        ...
