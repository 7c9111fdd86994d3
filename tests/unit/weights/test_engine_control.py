"""Controlling several engines at once, against servers without a model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from slime_core.errors import EngineError, EngineSilent, WeightSyncError
from slime_core.generation import SamplingParams
from slime_core.rollout.engines.client import GenerateClient
from slime_core.weights import engine_control
from slime_core.weights.engine_control import Bucket, EngineControl, PauseMode, call
from slime_core.weights.hugging_face import WeightSpec
from slime_testing.fake_engine import FakeEngine
from tests.http_service import HttpService

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


def test_a_refusal_names_engine_endpoint_status_and_body(control: EngineControl) -> None:
    with pytest.raises(WeightSyncError, match=r"http://127.0.0.1:\d+/end_weight_update .*status 400.*session"):
        control.end_update()


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


def test_engines_of_several_processes_get_consecutive_ranks(engines: tuple[FakeEngine, ...]) -> None:
    control = EngineControl([engine.url for engine in engines], ranks_per_engine=2)
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="nccl")
    assert [engine.joined for engine in engines] == [(1, 5), (3, 5)]


def test_engines_of_different_sizes_get_as_many_ranks_as_they_have(engines: tuple[FakeEngine, ...]) -> None:
    control = EngineControl([engine.url for engine in engines], ranks_per_engine=(4, 1))
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="nccl")
    assert [engine.joined for engine in engines] == [(1, 6), (5, 6)]


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


@pytest.mark.parametrize("released", [["weights"], ["kv_cache", "weights"]])
def test_memory_is_neither_released_twice_nor_resumed_unasked(control: EngineControl, released: list[str]) -> None:
    control.release_memory(*released)
    with pytest.raises(WeightSyncError, match=r"cannot release \['weights'\]; released already:"):
        control.release_memory("weights")
    control.resume_memory(*released)
    with pytest.raises(WeightSyncError, match=r"cannot resume \['weights'\]; released: \[\]"):
        control.resume_memory("weights")


def test_unknown_memory_is_refused(control: EngineControl) -> None:
    with pytest.raises(WeightSyncError, match=r"cannot release \['cache'\]"):
        control.release_memory("cache")


def test_weights_without_memory_are_not_updated(control: EngineControl) -> None:
    control.release_memory("weights")
    with pytest.raises(WeightSyncError, match=r"begin_weight_update .*status 400.*memory"):
        control.begin_update()
    control.resume_memory("weights")
    control.begin_update()


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
async def test_nothing_is_generated_without_memory(
    control: EngineControl, engines: tuple[FakeEngine, ...], tag: str
) -> None:
    control.release_memory(tag)
    async with GenerateClient(engines[0].url, timeout_s=60) as client:
        with pytest.raises(EngineError, match=rf"status 400: .*without \['{tag}'\]"):
            await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4))
        control.resume_memory(tag)
        await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(("mode", "idle"), [(None, False), ("in_place", False), ("retract", True)])
async def test_memory_is_released_by_engines_that_do_not_generate(
    control: EngineControl, engines: tuple[FakeEngine, ...], mode: PauseMode | None, idle: bool
) -> None:
    engines[0].delay_s = 60
    async with GenerateClient(engines[0].url, timeout_s=60) as client:
        asking = asyncio.create_task(client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4)))
        while not engines[0].most_in_flight:
            await asyncio.sleep(0)
        if mode is not None:
            control.pause(mode)
        with nullcontext() if idle else pytest.raises(WeightSyncError, match="server is idle"):
            control.release_memory("kv_cache")
        for engine in engines:
            engine.released.clear()
        control.resume()
        async with client.aborting():
            await asking


def test_a_server_with_another_key_is_reported() -> None:
    with HttpService(lambda body: body) as service:
        service.fail_with = [401]
        names = f"{service.url}/pause_generation .*status 401: .*refused by the test.*SLIME_ENGINE_KEY"
        with pytest.raises(WeightSyncError, match=names):
            call(service.url, "/pause_generation", {}, timeout_s=60)
