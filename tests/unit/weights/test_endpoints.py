"""Controlling several engines at once, against servers without a model."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from slime_core.errors import WeightSyncError
from slime_core.testing.fake_engine import FakeEngine
from slime_core.weights.bucket import Bucket
from slime_core.weights.endpoints import EngineControl
from slime_core.weights.specs import WeightSpec

BUCKET = Bucket((WeightSpec("norm", "float32", (4,)),))


class Sent:
    """A broadcast that counts how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with FakeEngine() as first, FakeEngine() as second:
        yield first, second


@pytest.fixture
def control(engines: tuple[FakeEngine, FakeEngine]) -> Iterator[EngineControl]:
    found = EngineControl([engine.url for engine in engines], timeout_s=5)
    yield found
    found.close()


def test_an_update_reaches_every_engine_in_the_right_order(
    control: EngineControl, engines: tuple[FakeEngine, ...]
) -> None:
    sent = Sent()
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="gloo")
    control.pause()
    control.begin_update()
    control.update_from_distributed(BUCKET, group="g", send=lambda: sent, version="7")
    control.end_update()
    control.resume()
    assert control.version() == "7"
    assert sent.waited == 1
    assert [engine.loaded for engine in engines] == [["norm"], ["norm"]]


def test_a_refusal_names_engine_endpoint_status_and_body(control: EngineControl) -> None:
    with pytest.raises(
        WeightSyncError, match=r"http://127.0.0.1:\d+/end_weight_update refused with status 400.*session"
    ):
        control.end_update()


def test_a_refused_update_does_not_wait_for_its_broadcast(control: EngineControl) -> None:
    sent = Sent()
    with pytest.raises(WeightSyncError, match="must run between"):
        control.update_from_distributed(BUCKET, group="g", send=lambda: sent)
    assert sent.waited == 0


def test_an_engine_that_is_gone_is_named(control: EngineControl, engines: tuple[FakeEngine, ...]) -> None:
    engines[1].stop()
    with pytest.raises(WeightSyncError, match=f"{engines[1].url}/flush.*limit 5 s.*ConnectionRefused"):
        control.flush_cache()


def test_the_call_that_failed_first_is_told_while_another_hangs(engines: tuple[FakeEngine, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        control = EngineControl([url, engines[1].url], timeout_s=2)
        begun_s = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"{engines[1].url}/end_weight_update refused"):
            control.end_update()
        assert time.monotonic() - begun_s < 1.5
        control.close()


def test_engines_of_different_versions_are_an_error(control: EngineControl, engines: tuple[FakeEngine, ...]) -> None:
    EngineControl([engines[0].url]).set_version("8")
    with pytest.raises(WeightSyncError, match="serve different weights"):
        control.version()


def test_engines_of_several_processes_get_consecutive_ranks(engines: tuple[FakeEngine, ...]) -> None:
    control = EngineControl([engine.url for engine in engines], ranks_per_engine=2)
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="nccl")
    assert [engine.joined for engine in engines] == [(1, 5), (3, 5)]


def test_no_engines_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no engine URL"):
        EngineControl([])
