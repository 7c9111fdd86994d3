"""Queries about processes that may end during the query: a process that has ended is no error."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

__all__ = ["children", "left_of", "runs", "words"]

DELIVERED_S = 60.0
"""Seconds within which a signal ends its process, even on an overloaded machine. A process that a test expects to be
killed must run longer than this by itself."""


def runs(process: psutil.Process | int) -> bool:
    """Whether the process is alive. A zombie has ended: only its exit status is still to be read."""
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
    """Its command line; empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def children(holding: str, of: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """The processes of ``of`` (default: the children of this process) whose command line contains ``holding``."""
    found = psutil.Process().children() if of is None else of
    return [one for one in found if holding in " ".join(words(one))]
