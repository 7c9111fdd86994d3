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


@pytest.mark.parametrize("later", ["default", "2"])
def test_an_engine_that_holds_older_weights_than_before_ends_the_run(engine, holds, later):
    watch = ExternalWatcher([engine.url])
    for version in ("default", "3"):
        holds(version)
        watch.poll()
    holds(later)
    message = (
        f"The engine at {engine.url}, an external one, held weights of version 3 and now holds version "
        f"'{later}': it was restarted, or another run publishes to it."
    )
    with pytest.raises(EngineError) as caught:
        watch.poll()
    assert str(caught.value).startswith(message)


def test_an_engine_that_takes_no_connection_three_times_is_gone(engine):
    with FakeEngine() as other:
        watch = ExternalWatcher([other.url, engine.url])
        engine.stop()
        watch.poll()
        watch.poll()
        with pytest.raises(EngineError) as caught:
            watch.poll()
    assert str(caught.value).startswith(f"The engine at {engine.url}, an external one, is gone: Connection")
    assert "continue from the last checkpoint with --load" in str(caught.value)


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
        with pytest.raises(EngineError, match=rf"The engine at {url}, an external one, runs, but .* so it hangs"):
            watch.poll()


def test_an_address_where_something_else_answers_ends_the_run(engine, holds, monkeypatch: pytest.MonkeyPatch):
    watch = ExternalWatcher([engine.url])
    for version in ("1", "2"):
        holds(version)
        watch.poll()
    monkeypatch.setattr(external, "call", lambda *_, **__: "<html>")
    with pytest.raises(EngineError, match="held weights of version 2 and now holds version ''"):
        watch.poll()
