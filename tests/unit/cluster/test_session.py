"""What a session leaves as it was; the rest needs a cluster."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from slime_core.cluster.session import Session


@pytest.fixture
def handler() -> Iterator[Any]:
    def ours(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    yield ours
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", ["local", "auto"])
def test_the_handler_of_sigterm_survives_the_start_of_ray(
    address: str, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    with Session(address, namespace="n"):
        assert seen == [handler]
        assert signal.getsignal(signal.SIGTERM) is handler
