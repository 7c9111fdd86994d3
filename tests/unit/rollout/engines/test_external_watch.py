"""The watch of external engines: engines that are gone, and engines whose weights another client changed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from slime_core.errors import EngineError
from slime_core.rollout.engines import external, server
from slime_core.rollout.engines.external import ExternalWatcher
from slime_core.weights.engine_control import call
from slime_testing.fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as fake:
        yield fake


@pytest.fixture
def holds(engine: FakeEngine) -> Callable[[str], None]:
    return lambda version: call(engine.url, "/update_weight_version", {"new_version": version}, timeout_s=60)


def test_versions_that_rise_are_this_runs_own(engine, holds):
    watch = ExternalWatcher([engine.url])
    for version in ("7", "0", "1", "1", "4"):  # 7: left by an earlier run
        holds(version)
        watch.poll()


@pytest.mark.parametrize("later", ["default", "2", None])
def test_an_engine_that_holds_older_weights_than_before_ends_the_run(engine, holds, later, monkeypatch):
    watch = ExternalWatcher([engine.url])
    for version in ("default", "3"):
        holds(version)
        watch.poll()
    if later is None:  # something else answers at its address
        monkeypatch.setattr(external, "call", lambda *_, **__: "<html>")
    else:
        holds(later)
    with pytest.raises(EngineError, match=f"{engine.url}, .* version 3 .* version '{later or ''}'"):
        watch.poll()


def test_an_engine_that_takes_no_connection_three_times_is_gone(engine):
    with FakeEngine() as other:
        watch = ExternalWatcher([other.url, engine.url])
        engine.stop()
        watch.poll()
        watch.poll()
        with pytest.raises(EngineError, match=rf"{engine.url}, .*: Connection(?s:.*) --load"):
            watch.poll()


def test_an_engine_that_is_slow_is_not_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external, "POLL_LIMIT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections and says nothing
        watch = ExternalWatcher([f"http://127.0.0.1:{listening.getsockname()[1]}"])
        for _ in range(5):
            watch.poll()


def test_an_engine_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections and says nothing
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(server, "LONGEST_ANSWER_S", 0.05)
        watch = ExternalWatcher([url])
        watch.watch_answers(url, limit_s=0.05)
        with pytest.raises(EngineError, match=f"{url}, .* hangs"):
            watch.poll()
