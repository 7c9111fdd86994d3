"""Requests, retries and refusals, against a server without a model."""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from slime_core.errors import EngineError, RequestFailed, RequestRefused
from slime_core.generation import Generation, SamplingParams
from slime_core.rollout.engines import client as module
from slime_core.rollout.engines.client import COPIED_TOKENS, LOOKS, SHORT_RESPONSE, GenerateClient, ShortRequests
from slime_testing.fake_engine import FakeEngine
from tests.simulated_clock import only_pauses_take_time, only_waits_take_time

Patch = pytest.MonkeyPatch
ALONE = SamplingParams(max_new_tokens=SHORT_RESPONSE + 1)
"""Of requests that are never joined."""
SHORT = SamplingParams(max_new_tokens=SHORT_RESPONSE)
LONG = [3] * (COPIED_TOKENS + 1)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as fake:
        yield fake


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(engine.url, max_in_flight=3, timeout_s=60, vocab_size=16) as found:
        yield found


@pytest.fixture
def once(monkeypatch: Patch) -> None:
    """Pauses are longer than any limit, so that a request which fails is not sent again, whatever the clock says."""
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(module, name, 1000.0)


async def test_a_response_comes_back_with_ids_log_probabilities_and_version(client: GenerateClient) -> None:
    (answer,) = await client.generate([3, 4], sampling=ALONE)
    ids, log_probs = array("i", [9, 4, 8, 2, 1]), array("f", [-0.5] * 5)
    assert answer == Generation(ids, log_probs, "stop", ("default",), weight_spans=(("default", 0, 5),))


@pytest.mark.parametrize(
    ("ids", "n", "extra", "sent"),
    [
        ([3, 4], 2, None, ([[3, 4], [3, 4]], 1)),
        ([3, 4], 1, None, ([3, 4], 1)),
        (LONG, 2, None, (LONG, 2)),
        ([3, 4], 2, {"image_data": ["a picture of this prompt"]}, ([3, 4], 2)),
    ],
)
async def test_a_short_prompt_is_sent_once_for_each_response(
    client: GenerateClient, engine: FakeEngine, ids: list[int], n: int, extra: Any, sent: Any
) -> None:
    answers = await client.generate(ids, sampling=ALONE, n=n, extra=extra)
    assert [list(answer.token_ids) for answer in answers] == [list(answers[0].token_ids)] * n
    (body,) = engine.bodies
    assert (body["input_ids"], body["sampling_params"]["n"]) == sent


async def test_short_requests_of_one_pass_are_sent_as_one(engine: FakeEngine) -> None:
    async with GenerateClient(engine.url, max_in_flight=6) as client:
        calls = (client.generate([3, number], sampling=SHORT, n=2) for number in (4, 5, 6))
        answers = await asyncio.gather(*calls)
    assert [len(rows) for rows in answers] == [2, 2, 2]
    (body,) = engine.bodies
    assert body["input_ids"] == [[3, 4], [3, 4], [3, 5], [3, 5], [3, 6], [3, 6]]
    assert body["sampling_params"]["n"] == 1


@pytest.mark.parametrize(
    "own",
    [{"timeout_s": 60.0}, {"session": "a conversation"}, {"extra": {"image_data": ["a picture"]}}, {"sampling": ALONE}],
)
async def test_requests_that_differ_are_sent_by_themselves(
    client: GenerateClient, engine: FakeEngine, own: dict[str, Any]
) -> None:
    await asyncio.gather(client.generate([3], sampling=SHORT), client.generate([4], **{"sampling": SHORT, **own}))
    assert sorted(str(body["input_ids"]) for body in engine.bodies) == ["[3]", "[4]"]


class Posts:
    """Answers each prompt with its own text, and keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[list[int]], Any]] = []

    async def __call__(self, prompts: list[list[int]], fields: Mapping[str, Any]) -> list[Any]:
        self.sent.append((list(prompts), fields))
        await asyncio.sleep(0)
        return list(map(str, prompts))


async def test_a_caller_that_is_cancelled_takes_no_answer_from_the_others() -> None:
    short = ShortRequests(Posts(), 1)
    first, second = (asyncio.create_task(short.request([[number]], {})) for number in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ["[1]"]


async def test_a_request_whose_callers_are_gone_ends_with_the_client(engine: FakeEngine) -> None:
    engine.delay_s = 60
    async with GenerateClient(engine.url) as client:
        asked = asyncio.create_task(client.generate([3], sampling=SHORT))
        while not engine.most_in_flight:
            await asyncio.sleep(0)
        asked.cancel()
    await asyncio.sleep(0.5)  # longer than the pause before a request is sent again
    assert engine.calls.count("/generate") == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("status", [408, 429])
async def test_a_request_to_an_overloaded_engine_fails_without_a_retry(
    client: GenerateClient, engine: FakeEngine, status: int
) -> None:
    engine.fail_with = [status]
    with pytest.raises(RequestFailed) as failed:
        await client.generate([3], sampling=ALONE)
    assert engine.calls.count("/generate") == 1
    assert failed.value.cause == f"engine_status_{status}"
    assert "--sglang-server-concurrency" in str(failed.value)


async def test_a_failure_that_lasts_ends_with_the_time_limit(
    client: GenerateClient, engine: FakeEngine, monkeypatch: Patch
) -> None:
    only_pauses_take_time(monkeypatch, module)
    engine.fail_with = [500] * 100
    with pytest.raises(RequestFailed, match=r" 60 s .*\d\d attempts.*status 500") as failed:
        await client.generate([3], sampling=ALONE)
    assert failed.value.cause == "engine_status_500"
    # Pauses of 0.1, 0.2, ... 3.2 s and then of 5 s, each shortened by half at most.
    assert 16 <= engine.calls.count("/generate") <= 32


Clock = Callable[[], float]


@pytest.fixture
def clock(engine: FakeEngine, monkeypatch: Patch) -> Clock:
    """The client's clock: it starts once the engine has a request, and runs while the client waits for the answer."""
    return only_waits_take_time(monkeypatch, module, start=lambda: engine.bodies)


async def passed(clock: Clock, seconds: float, asked: asyncio.Task[list[Generation]]) -> None:
    """Return when so many seconds have passed for the client, during which the request was not answered."""
    while clock() < seconds and not asked.done():
        await asyncio.sleep(0.001)
    assert not asked.done()


async def test_a_slow_response_outlasts_the_limit_while_its_engine_computes(engine: FakeEngine, clock: Clock) -> None:
    engine.holds = True
    async with GenerateClient(engine.url, timeout_s=3) as client:
        asked = asyncio.create_task(client.generate([3, 4], sampling=ALONE, n=2))
        await passed(clock, 30, asked)
        engine.holds = False
        assert [list(answer.token_ids) for answer in await asked] == [[9, 4, 8, 2, 1]] * 2
    assert engine.calls.count("/generate") == 1


async def test_an_engine_whose_counters_stand_still_fails_the_request(engine: FakeEngine, clock: Clock) -> None:
    engine.holds = engine.stuck = True
    async with GenerateClient(engine.url, timeout_s=3) as client:
        with pytest.raises(RequestFailed, match=r"within 3 s and 1 attempts; .*/v1/loads") as failed:
            await client.generate([3], sampling=ALONE)
    assert failed.value.cause == "engine_timeout"
    assert clock() == 3
    assert engine.calls.count("/v1/loads") == LOOKS


async def test_the_first_response_of_an_engine_is_waited_for(engine: FakeEngine, clock: Clock, once: None) -> None:
    engine.holds = engine.stuck = True
    async with GenerateClient(engine.url, timeout_s=8, first_answer_s=200) as client:
        with pytest.raises(RequestFailed) as failed:
            await client.generate([3], sampling=ALONE)
    assert failed.value.cause == "engine_timeout"
    assert 200 <= clock() <= 200 + 2 * 8


async def test_a_paused_engine_fails_no_request(engine: FakeEngine, clock: Clock) -> None:
    async with GenerateClient(engine.url, timeout_s=3) as client, aiohttp.ClientSession() as session:
        await session.post(f"{engine.url}/pause_generation", json={"mode": "retract"})
        asked = asyncio.create_task(client.generate([3, 4], sampling=ALONE))
        await passed(clock, 30, asked)
        await session.post(f"{engine.url}/continue_generation", json={})
        assert (await asked)[0].finish_reason == "stop"


@pytest.mark.parametrize("fault", ["reset", "torn", "garbage"])
async def test_an_answer_that_breaks_off_is_requested_again(
    client: GenerateClient, engine: FakeEngine, fault: str
) -> None:
    engine.faults = [fault, fault]
    (answer,) = await client.generate([3, 4], sampling=ALONE)
    assert list(answer.token_ids) == [9, 4, 8, 2, 1]
    assert engine.calls.count("/generate") == 3


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("reset", "engine_connection"),
        ("torn", "engine_connection"),
        ("garbage", "engine_malformed"),
        ("hang", "engine_timeout"),
        (503, "engine_status_503"),
    ],
)
async def test_a_request_that_fails_for_good_says_how(
    client: GenerateClient, engine: FakeEngine, fault: str | int, cause: str, once: None
) -> None:
    engine.faults = [fault] * 50 if isinstance(fault, str) else []
    engine.fail_with = [fault] * 50 if isinstance(fault, int) else []
    with pytest.raises(RequestFailed) as failed:
        await client.generate([3], sampling=ALONE, timeout_s=0.3 if fault == "hang" else 60)
    assert failed.value.cause == cause
    assert pickle.loads(pickle.dumps(failed.value)).cause == cause


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_no_refused_request_is_repeated(client: GenerateClient, engine: FakeEngine, status: int) -> None:
    engine.fail_with = [status, 500]
    with pytest.raises(RequestRefused, match=f"{engine.url}/generate .*status {status}.*set by the test"):
        await client.generate([3], sampling=ALONE)
    assert engine.calls.count("/generate") == 1


@asynccontextmanager
async def saying(content: bytes) -> AsyncIterator[str]:
    """The address of a server that answers every connection with ``content``, whatever it is sent."""

    answering: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.read(1)
        writer.write(content)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*answering)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"220 mail.example ESMTP\r\n\r\n", "HTTP"),
        (ok(b"null"), "null"),
        (ok(b"{}"), "{}"),
        (ok(b'[{"meta_info": {}}, 3]'), "SGLang"),
        (ok(b'{"output_ids": [3], "meta_info": {"finish_reason": null}}'), "null}}"),
    ],
)
async def test_a_malformed_response_fails_its_sample_and_not_the_run(content: bytes, shown: str, once: None) -> None:
    async with saying(content) as url, GenerateClient(url, timeout_s=60) as client:
        with pytest.raises(RequestFailed) as caught:
            await client.generate([3], sampling=ALONE)
    assert caught.value.cause == "engine_malformed"
    assert shown in str(caught.value)


async def test_engines_abort_requests_that_a_function_sent_by_itself(
    client: GenerateClient, engine: FakeEngine
) -> None:
    engine.delay_s = 60
    body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 4}}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(f"{engine.url}/generate", json=body))
        while not engine.most_in_flight:
            await asyncio.sleep(0)
        async with client.aborting(), await request as response:
            assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_requests_can_be_ended_with_the_tokens_that_they_have(client: GenerateClient, engine: FakeEngine) -> None:
    engine.delay_s, engine.partial = 60, 2
    requests = [asyncio.create_task(client.generate([3, 4], sampling=ALONE)) for _ in range(5)]
    while engine.most_in_flight < 3:
        await asyncio.sleep(0)
    async with client.aborting():
        answers = [answer for (answer,) in await asyncio.gather(*requests)]
    assert [list(answer.token_ids) for answer in answers] == [[9, 4]] * 3 + [[]] * 2
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert engine.calls.count("/generate") == 3
    engine.delay_s = 0
    assert (await client.generate([3, 4], sampling=ALONE))[0].finish_reason == "stop"


async def test_finished_responses_of_unanswered_requests_make_room(engine: FakeEngine, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    engine.delay_s = 1000
    async with GenerateClient(engine.url, max_in_flight=16) as client:
        asking = [asyncio.create_task(client.generate(LONG, sampling=ALONE, n=8)) for _ in range(4)]
        while engine.calls.count("/v1/loads") < 5:
            await asyncio.sleep(0)
        assert engine.most_in_flight == 2
        engine.finished = 8
        while engine.most_in_flight < 3:
            await asyncio.sleep(0)
        assert client.num_in_flight == 32
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert client.num_in_flight == 0


@pytest.mark.parametrize("ids", [[3, 16], [-1]])
async def test_ids_that_would_kill_the_server_are_not_sent(
    client: GenerateClient, engine: FakeEngine, ids: list[int]
) -> None:
    with pytest.raises(EngineError, match="0 to 15"):
        await client.generate(ids, sampling=ALONE)
    assert engine.calls == []


async def test_once_an_engine_has_answered_the_ordinary_limit_counts(
    engine: FakeEngine, clock: Clock, once: None
) -> None:
    async with GenerateClient(engine.url, timeout_s=1e6, first_answer_s=1e6) as client:
        await client.generate([3], sampling=ALONE)
        engine.holds = engine.stuck = True
        answered_s, client._timeout_s = clock(), 8
        with pytest.raises(RequestFailed):
            await client.generate([3], sampling=ALONE)
        assert clock() - answered_s <= 2 * 8
