"""The engine without a model behaves like the real one: the same assertions on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import slime_core
from slime_core.errors import EngineError, WeightSyncError
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.generation import SamplingParams
from slime_core.testing.fake_engine import FakeEngine
from slime_core.weights.bucket import Bucket
from slime_core.weights.endpoints import EngineControl
from slime_core.weights.specs import WeightSpec

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
BUCKET = Bucket((WeightSpec("model.norm.weight", "float32", (64,)),))


@pytest.fixture(params=["fake", "real"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "real":
        engine: Any = request.getfixturevalue("engine")
        yield engine.server.url
    else:
        with FakeEngine(vocab_size=16, context_length=128) as fake:
            yield fake.url


@pytest.fixture
def control(url: str) -> Iterator[EngineControl]:
    found = EngineControl([url], timeout_s=20)
    yield found
    found.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(url, timeout_s=20) as found:
        yield found


async def test_every_token_has_a_log_probability_and_ids_are_in_range(client: GenerateClient) -> None:
    groups = await client.generate_many([[3, 4], [5]], sampling=SamplingParams(max_new_tokens=8), n=3)
    answers = [answer for group in groups for answer in group]
    assert [len(group) for group in groups] == [3, 3]
    assert all(len(answer.log_probs) == len(answer.token_ids) <= 8 for answer in answers)
    assert all(0 <= token < 16 for answer in answers for token in answer.token_ids)
    assert all(log_prob <= 0 for answer in answers for log_prob in answer.log_probs)
    assert {answer.weight_versions for answer in answers} == {("default",)}


async def test_a_cut_response_and_an_ended_one_say_so(client: GenerateClient) -> None:
    (cut,) = await client.generate([3, 8, 4], sampling=SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True))
    ends = SamplingParams(temperature=0, max_new_tokens=8, stop_token_ids=(cut.token_ids[0],))
    (ended,) = await client.generate([3, 8, 4], sampling=ends)
    assert (cut.finish_reason, ended.finish_reason) == ("length", "stop")
    assert cut.token_ids == ended.token_ids


@pytest.mark.parametrize("length", [128, 1000])
async def test_too_long_a_response_is_refused(client: GenerateClient, length: int) -> None:
    with pytest.raises(EngineError, match=r"status 400: .*maximum context length"):
        await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=length))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_engine_holds_requests_and_answers_control_calls(
    client: GenerateClient, control: EngineControl, mode: Any
) -> None:
    control.pause(mode)
    asking = asyncio.create_task(client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4)))
    await asyncio.sleep(0.3)
    assert (asking.done(), control.version()) == (False, "default")
    control.resume()
    assert len(await asking) == 1


def test_the_cache_can_be_flushed_while_paused(control: EngineControl) -> None:
    control.pause("retract")
    control.flush_cache()
    control.resume()


def test_an_update_session_opens_once_and_closes_once(control: EngineControl) -> None:
    control.begin_update()
    with pytest.raises(WeightSyncError, match=r"status 400: .*already open"):
        control.begin_update()
    control.end_update()
    with pytest.raises(WeightSyncError, match=r"status 400: .*no weight-update session is open"):
        control.end_update()


def test_weights_outside_a_session_are_refused(control: EngineControl) -> None:
    with pytest.raises(WeightSyncError, match=r"status 400: .*must run between begin_weight_update"):
        control.update_from_distributed(BUCKET, group="g", send=Never)


def test_weights_for_an_unknown_group_are_refused(control: EngineControl) -> None:
    control.begin_update()
    with pytest.raises(WeightSyncError, match=r"status 400: .*Group g not in \[\]"):
        control.update_from_distributed(BUCKET, group="g", send=Never)
    control.end_update()


def test_shared_weights_outside_a_session_are_refused(control: EngineControl) -> None:
    with pytest.raises(WeightSyncError, match=r"status 400: .*must run between begin_weight_update"):
        control.update_from_tensor([["AAAA"]])


def test_a_folder_without_weights_is_refused_and_changes_nothing(control: EngineControl, tmp_path: Path) -> None:
    held = control.checksum()
    for folder in (tmp_path, tmp_path / "not there"):
        with pytest.raises(WeightSyncError, match=r"status 400: .*Failed to get weights iterator"):
            control.update_from_disk(folder, version="9")
    assert (control.version(), control.checksum()) == ("default", held)


def test_spoiled_weights_differ_until_they_are_loaded_again(control: EngineControl) -> None:
    (held,) = control.checksum()
    control.spoil()
    (spoiled,) = control.checksum()
    assert all(spoiled.ranks[0][name] != digest for name, digest in held.ranks[0].items())
    control.update_from_disk(MODEL, version="default")
    assert control.checksum() == (held,)


def test_leaving_an_unknown_group_is_refused(control: EngineControl) -> None:
    with pytest.raises(WeightSyncError, match=r"status 400: .*does not exist"):
        control.destroy_group("g")


def test_a_version_can_be_set_and_read(control: EngineControl) -> None:
    control.set_version("12")
    assert control.version() == "12"
    control.set_version("default")


async def test_memory_can_be_released_and_resumed_part_by_part(control: EngineControl, client: GenerateClient) -> None:
    control.release_memory("kv_cache")
    control.release_memory("weights")
    control.resume_memory("weights")
    control.begin_update()
    control.end_update()
    control.resume_memory("kv_cache")
    assert len(await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4))) == 1


def test_what_is_held_is_told_in_digests_that_stay_the_same(control: EngineControl) -> None:
    first, second = control.checksum(), control.checksum()
    assert first == second
    assert len(first[0].total) == 64
    assert all(len(digest) == 16 for digest in first[0].ranks[0].values())


class Never:
    """A broadcast that must not be waited for."""

    def wait(self) -> None:
        raise AssertionError("nobody receives")
