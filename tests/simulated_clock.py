"""Time limits without waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

__all__ = ["only_pauses_take_time"]


def only_pauses_take_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], float]:
    """For ``module`` time passes by the seconds that it sleeps itself, and sleeping takes none; its clock."""
    now_s = [0.0]

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return lambda: now_s[0]
