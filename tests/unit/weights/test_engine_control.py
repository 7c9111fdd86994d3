"""Controlling several engines at once, against servers without a model."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from slime_core.errors import EngineSilent, WeightSyncError
from slime_core.weights import engine_control
from slime_core.weights.engine_control import Bucket, EngineControl, call, reserve_port, serve_store
from slime_core.weights.hugging_face import WeightSpec
from slime_testing.fake_engine import FakeEngine
from tests.http_service import HttpService
from tests.ports import kept_port

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
    found = EngineControl([engine.url for engine in engines], timeout_s=60)
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


def test_a_refused_update_does_not_wait_for_its_broadcast(control: EngineControl) -> None:
    sent = Sent()
    with pytest.raises(WeightSyncError, match="must run between"):
        control.update_from_distributed(BUCKET, group="g", send=lambda: sent)
    assert sent.waited == 0


def test_an_engine_that_is_gone_is_named(control: EngineControl, engines: tuple[FakeEngine, ...]) -> None:
    engines[1].stop()
    with pytest.raises(EngineSilent, match=f"{engines[1].url}/flush.*limit 60 s.*ConnectionRefused"):
        control.flush_cache()


def test_the_call_that_failed_first_is_reported_while_another_hangs(engines: tuple[FakeEngine, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        control = EngineControl([url, engines[1].url], timeout_s=3600)  # who waited for both would hear it then
        with pytest.raises(WeightSyncError, match=f"{engines[1].url}/end_weight_update refused"):
            control.end_update()
        control.close()


def test_an_engine_that_answers_nothing_is_noticed_before_the_limit_of_calls_that_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_control, "PROMPT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        control = EngineControl([f"http://127.0.0.1:{silent.getsockname()[1]}"], timeout_s=3600)
        for prompt in (control.pause, control.begin_update):
            with pytest.raises(EngineSilent, match=r"limit 0\.1 s"):
                prompt()
        with pytest.raises(EngineSilent, match=r"end_weight_update .*limit 0\.2 s"):
            control.end_update(limit_s=0.2)
        control.close()


def test_engines_of_different_versions_are_an_error(control: EngineControl, engines: tuple[FakeEngine, ...]) -> None:
    EngineControl([engines[0].url]).set_version("8")
    with pytest.raises(WeightSyncError, match="serve different weights"):
        control.version()


@pytest.mark.parametrize(("ranks", "joined"), [(2, [(1, 5), (3, 5)]), ((4, 1), [(1, 6), (5, 6)])])
def test_engines_of_several_processes_get_as_many_consecutive_ranks(
    engines: tuple[FakeEngine, ...], ranks: int | tuple[int, ...], joined: list[tuple[int, int]]
) -> None:
    control = EngineControl([engine.url for engine in engines], ranks_per_engine=ranks)
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="nccl")
    assert [engine.joined for engine in engines] == joined


def test_no_engines_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="No engine URL"):
        EngineControl([])


# --- Memory, where the fake is stricter than the server: see its module -----------------------------------------------


def test_memory_is_released_and_resumed_by_tags_or_all_at_once(
    control: EngineControl, engines: tuple[FakeEngine, ...]
) -> None:
    control.release_memory("kv_cache")
    control.release_memory("weights")
    assert [engine.released for engine in engines] == [{"kv_cache", "weights"}] * 2
    control.resume_memory("weights")
    assert [engine.released for engine in engines] == [{"kv_cache"}] * 2
    control.resume_memory("kv_cache")
    control.release_memory()
    assert [engine.released for engine in engines] == [{"kv_cache", "weights", "cuda_graph"}] * 2
    control.resume_memory()
    assert [engine.released for engine in engines] == [set()] * 2


def test_a_server_with_another_key_is_reported() -> None:
    with HttpService(lambda body: body) as service:
        service.fail_with = [401]
        names = f"{service.url}/pause_generation .*status 401: .*refused by the test.*SLIME_ENGINE_KEY"
        with pytest.raises(WeightSyncError, match=names):
            call(service.url, "/pause_generation", {}, timeout_s=60)


# --- Where the processes of an update group meet ----------------------------------------------------------------------

LIMIT = timedelta(seconds=60)


def test_a_store_listens_on_its_own_address_only() -> None:
    store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT)
    listening = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"]
    assert [one.ip for one in listening if one.port == store.port] == ["127.0.0.1"]


def test_other_ranks_connect_to_a_store_at_a_given_port() -> None:
    with kept_port() as port:
        store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT, port=port)
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("rank", "1")
    assert store.get("rank") == b"1"


def test_a_reserved_port_is_taken_only_by_the_store_it_was_reserved_for() -> None:
    port = reserve_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    store = serve_store("127.0.0.1", world_size=2, timeout=LIMIT, port=port)
    assert store.port == port
    TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT).set("met", "here")
    assert store.get("met") == b"here"
