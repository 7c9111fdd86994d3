"""Ctrl-C and SIGTERM while a run is being taken down: they wait, because what they would break off is the very end that
they ask for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupts"]

ENDING = (
    b"slime: ending; what was started is being stopped, which takes some seconds. Asked once more, slime ends at once, "
    b"and may leave processes and files behind.\n"
)
STDERR = 2
PATIENCE = 1
"""Signals that wait."""


class Interrupts:
    """``with Interrupts() as interrupts:`` lets signals through until :meth:`hold` is called in the block.

    From then on to the end of the block the first one is answered by a message, and becomes a ``KeyboardInterrupt``
    after the block, unless the block fails anyway. The second one is a ``KeyboardInterrupt`` at once. A signal that is
    ignored, as Ctrl-C in the background of a shell, still is. Python handles signals in the main thread alone: in
    another one nothing is held.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._came = 0

    def __enter__(self) -> Self:
        return self

    def hold(self) -> None:
        """What is begun from here on is ended in peace."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._came and kind is None:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        if self._came > PATIENCE:
            raise KeyboardInterrupt
        os.write(STDERR, ENDING)  # print() may be what was interrupted
