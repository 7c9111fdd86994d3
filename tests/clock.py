"""Time limits without waiting for them."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace

import pytest

__all__ = ["only_pauses_take_time"]


def only_pauses_take_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """For ``module`` time passes by the seconds that it sleeps itself, and sleeping takes none."""
    now_s = [0.0]

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
