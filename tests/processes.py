"""Processes that come and go while a test looks at them: one that has ended is no error."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

__all__ = ["children", "left_of", "runs", "words"]

DELIVERED_S = 60.0
"""Seconds in which a signal has ended its process, on a machine with far too much to do. What a test wants killed has
to live longer by itself."""


def runs(process: psutil.Process | int) -> bool:
    """Whether it has not ended; a zombie has, and only waits to be asked how."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def left_of(*processes: psutil.Process | int) -> list[psutil.Process | int]:
    """Those that still run after :data:`DELIVERED_S`; returns as soon as none does."""
    deadline_s = time.monotonic() + DELIVERED_S
    while (left := [one for one in processes if runs(one)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty: it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def children(holding: str, of: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """Those of ``of`` whose command line holds the text; None: of the children of this process."""
    found = psutil.Process().children() if of is None else of
    return [one for one in found if holding in " ".join(words(one))]
