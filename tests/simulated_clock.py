"""Time limits without waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

__all__ = ["only_pauses_take_time", "only_waits_take_time"]


def only_pauses_take_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], float]:
    """For ``module`` time passes by the seconds that it sleeps itself, and sleeping takes none; its clock."""
    now_s = [0.0]

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return lambda: now_s[0]


def only_waits_take_time(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, start: Callable[[], object]
) -> Callable[[], float]:
    """For ``module`` time passes by the limits of its own calls of ``asyncio.wait`` that end without a result, one
    after another, and only once ``start`` returns something true; its clock."""
    now_s = [0.0]

    async def wait(tasks: list[asyncio.Future[Any]], *, timeout: float) -> None:
        while not start():
            await asyncio.sleep(0.001)
        done, _ = await asyncio.wait(tasks, timeout=0.001)
        now_s[0] += 0 if done else timeout

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait": wait}))
    return lambda: now_s[0]
