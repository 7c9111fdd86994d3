"""SIGTERM, which schedulers send before they end a job: the run saves what it trained, and ends.

The weights belong to a whole number of rollouts while the run waits for the sampler, and only then. So the signal ends
these waits and no other; the loop knows nothing of it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from slime_core.errors import DEATHS


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the run saves what it trained and ends."""


class Termination:
    """Waits with the first SIGTERM for a moment at which the weights are those after a whole step.

    ``with Termination() as stop:`` takes the signal over; ``with stop.allowed():`` is such a moment, which it ends with
    :class:`Terminated`; so does the death of a process while the signal waits. The second SIGTERM is a
    ``KeyboardInterrupt`` at once. In another thread than the main one, where Python handles no signals, nothing
    changes.
    """

    def __init__(self) -> None:
        self._requested = False
        self._is_allowed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._requested and isinstance(error, DEATHS):
            raise Terminated from error  # instead of a restart

    @contextmanager
    def allowed(self, is_allowed: bool = True) -> Iterator[None]:
        """A signal that came before, or comes now, ends the block; False: no signal does."""
        self._is_allowed = is_allowed
        try:
            if self._requested and is_allowed:
                raise Terminated
            yield
        finally:
            self._is_allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        if self._is_allowed:
            raise Terminated
