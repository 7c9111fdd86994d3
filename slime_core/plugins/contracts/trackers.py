"""Where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Tracker"]


class Tracker(Protocol):
    """Sends metrics somewhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and let go; called once, also when the run failed."""
        ...
