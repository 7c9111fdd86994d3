"""Those who watch a run and may not end it: a tracker or a display that fails is counted, then left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable

__all__ = ["Observer"]

PATIENCE = 3
"""Failures after which an observer is called no more: a server may be away for a moment, a bug stays."""


class Observer:
    """A context in which ``name`` may fail; ``on_give_up`` hears about it once, after the third failure.

    Example: ``with observer: tracker.log(step, metrics)``. Only failures are contained: Ctrl-C and exits pass.
    """

    def __init__(self, name: str, *, on_give_up: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        self._on_give_up = on_give_up

    @property
    def active(self) -> bool:
        """Whether it is worth calling."""
        return self.failures < PATIENCE

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        if self.failures == PATIENCE:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._on_give_up(
                f"{self.name} failed {PATIENCE} times and is off for the rest of the run: "
                f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}). "
                "The run itself goes on; metrics.jsonl is complete."
            )
        return True
