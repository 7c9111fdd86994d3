"""Trackers and displays must not end a run: their failures are counted, and after three of them they are left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable

__all__ = ["Observer"]

MAX_FAILURES = 3
"""Failures after which an observer is not called any more: a server may be unreachable for a moment, a bug stays."""


class Observer:
    """A context in which ``name`` may fail; ``on_give_up`` is called once, after the third failure.

    Example: ``with observer: tracker.log(step, metrics)``. Exceptions are caught; Ctrl-C and exits are not.
    """

    def __init__(self, name: str, *, on_give_up: Callable[[str], None]) -> None:
        self.name = name
        self.failures = 0
        self._on_give_up = on_give_up

    @property
    def active(self) -> bool:
        """Whether it has failed less than three times."""
        return self.failures < MAX_FAILURES

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        if self.failures == MAX_FAILURES:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._on_give_up(
                f"{self.name} failed {MAX_FAILURES} times and is off for the rest of the run: "
                f"{type(error).__name__}: {error} ({where.filename}:{where.lineno}). "
                "The run itself goes on; metrics.jsonl is complete."
            )
        return True
