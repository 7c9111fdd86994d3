"""The engine without a model behaves like the real one: the same assertions on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import slime_core
from slime_core import EngineColumn
from slime_core.errors import EngineError, WeightSyncError
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.context import run_all
from slime_core.generation.sampling import until_stop
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.responses import LOADS, Load, read_load
from slime_core.rollout.engines.server import READY, FirstAnswer
from slime_core.weights.engine_control import SHA_DIGITS, XXH3_DIGITS, Bucket, EngineControl, call
from slime_core.weights.hugging_face import WeightSpec
from slime_testing.fake_engine import FakeEngine

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
BUCKET = Bucket((WeightSpec("model.norm.weight", "float32", (64,)),))


MANY = 200
"""Requests that together take seconds on the real engine."""

LONG = SamplingParams(max_new_tokens=110, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine; ``fake`` is None for the real one."""

    url: str
    fake: FakeEngine | None = None

    async def busy(self, client: GenerateClient) -> list[asyncio.Task[list[Generation]]]:
        """Many long requests that the engine has started."""
        if self.fake is not None:
            self.fake.delay_s, self.fake.partial = 60, 2
        tasks = [asyncio.create_task(client.generate([3, 8, 4], sampling=LONG)) for _ in range(MANY)]
        while self.fake is not None and self.fake.most_in_flight < MANY:
            await asyncio.sleep(0)
        if self.fake is None:  # queued after them: once it is answered, they have started
            await client.generate([3, 8, 4], sampling=SamplingParams(max_new_tokens=1))
        return tasks

    def text(self, ids: Sequence[int]) -> str:
        """What the engine reads in ``ids``."""
        return FakeEngine.text(ids) if self.fake else PromptEncoder(MODEL, apply_chat_template=False).decode_all(ids)

    decode_all = text

    def end_all(self) -> None:
        """Tell the engine to end what it has."""
        call(self.url, "/abort_request", {"abort_all": True}, timeout_s=120)


async def reasons_of(asking: Sequence[asyncio.Task[list[Generation]]]) -> set[str]:
    """Why they ended: they were ended, or complete where a busy machine let them come so far."""
    reasons = {answer.finish_reason for (answer,) in await asyncio.gather(*asking)}
    assert reasons <= {"abort", "length"}
    return reasons


@pytest.fixture(params=["fake", "real"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "real":
        engine: Any = request.getfixturevalue("engine")
        yield Subject(engine.server.url)
    else:
        with FakeEngine(vocab_size=16, context_length=128) as fake:
            yield Subject(fake.url, fake)


@pytest.fixture
def url(subject: Subject) -> str:
    return subject.url


@pytest.fixture
def control(url: str) -> Iterator[EngineControl]:
    control = EngineControl([url], timeout_s=120)
    yield control
    control.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(url, timeout_s=120) as client:
        yield client


async def test_every_token_has_a_log_probability_and_ids_are_in_range(client: GenerateClient) -> None:
    groups = await run_all(
        client.generate(ids, sampling=SamplingParams(max_new_tokens=8), n=3) for ids in ([3, 4], [5] * 20)
    )
    answers = [answer for group in groups for answer in group]
    assert [len(group) for group in groups] == [3, 3]
    assert all(len(answer.log_probs) == len(answer.token_ids) <= 8 for answer in answers)
    assert all(0 <= token < 16 for answer in answers for token in answer.token_ids)
    assert all(log_prob <= 0 for answer in answers for log_prob in answer.log_probs)
    assert {answer.weight_versions for answer in answers} == {("default",)}


def likeliest(meta_info: Any) -> list[list[float]]:
    return [[number for entry in row[:2] for number in entry[:2]] for row in meta_info["output_top_logprobs"]]


async def test_an_engine_returns_the_columns_that_a_loss_reads(subject: Subject) -> None:
    columns = {"likeliest": EngineColumn({"top_logprobs_num": 2}, likeliest, width=4)}
    async with GenerateClient(subject.url, timeout_s=120, columns=columns) as client:
        (answer,) = await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=8, temperature=0.0))
    column = answer.columns["likeliest"]
    assert column.shape == (len(answer.token_ids), 4)
    assert column[:, 1].tolist() == list(answer.token_ids)  # greedy: the sampled token is the likeliest
    assert (column[:, 0] >= column[:, 2]).all()


def load_of(url: str) -> Load:
    load = read_load(call(url, LOADS, timeout_s=120))
    assert load is not None
    return load


async def test_requests_are_counted_while_they_are_under_way(subject: Subject, client: GenerateClient) -> None:
    async def now() -> Load:
        return await asyncio.to_thread(load_of, subject.url)

    first, before = FirstAnswer(subject.url), await now()
    assert not await asyncio.to_thread(first.look)
    tasks, sequences = await subject.busy(client), 0
    while (load := await now()).counters == before.counters or not sequences:
        sequences = max(sequences, load.sequences)
        if all(task.done() for task in tasks):  # the engine publishes what it counts now and then
            tasks += await subject.busy(client)
    assert sequences <= MANY
    await asyncio.to_thread(subject.end_all)
    await asyncio.gather(*tasks)
    seen = [await now()]
    while len(seen) < 2 or seen[-1].counters != seen[-2].counters or seen[-1].sequences:
        await asyncio.sleep(1)
        seen.append(await now())
    assert await asyncio.to_thread(first.look)


async def test_a_cut_response_and_an_ended_one_say_so(client: GenerateClient) -> None:
    (cut,) = await client.generate([3, 8, 4], sampling=SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True))
    ends = SamplingParams(temperature=0, max_new_tokens=8, stop_token_ids=(cut.token_ids[0],))
    (ended,) = await client.generate([3, 8, 4], sampling=ends)
    assert (cut.finish_reason, ended.finish_reason) == ("length", "stop")
    assert cut.token_ids == ended.token_ids


async def test_a_stop_text_is_looked_for_in_what_one_request_samples(subject: Subject, client: GenerateClient) -> None:
    prompt, greedy = [3, 8, 4], SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    (free,) = await client.generate(prompt, sampling=greedy)
    first, last = next(pair for pair in pairwise(free.token_ids) if pair[0] != pair[1])
    place = list(pairwise(free.token_ids)).index((first, last))
    stops = replace(greedy, stop=(subject.text([first, last]),))
    (whole,) = await client.generate(prompt, sampling=stops)
    assert (whole.token_ids, whole.finish_reason) == (free.token_ids[: place + 2], "stop")
    before = list(free.token_ids[: place + 1])
    (rest,) = await client.generate([*prompt, *before], sampling=stops)
    assert (rest.token_ids[0], len(rest.token_ids) > 1) == (last, True)
    encoder: Any = subject
    assert [*before, *until_stop(before, rest, stops, encoder).token_ids] == list(whole.token_ids)


async def test_too_long_a_response_is_refused(client: GenerateClient) -> None:
    for length in (128, 1000):
        with pytest.raises(EngineError, match=r"status 400: .*maximum context length"):
            await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=length))


async def test_a_retracted_request_ends_at_once_when_it_is_aborted(
    subject: Subject, client: GenerateClient, control: EngineControl
) -> None:
    reasons: set[str] = set()
    while "abort" not in reasons:
        asking = await subject.busy(client)
        control.pause("retract")
        subject.end_all()
        reasons = await reasons_of(asking)
        control.resume()


async def test_a_request_paused_in_place_ends_when_the_engine_resumes(
    subject: Subject, client: GenerateClient, control: EngineControl
) -> None:
    reasons: set[str] = set()
    while "abort" not in reasons:
        asking = await subject.busy(client)
        control.pause("in_place")
        subject.end_all()
        await asyncio.sleep(0.3)
        held = [task for task in asking if not task.done()]
        control.resume()
        reasons = await reasons_of(held)
        await reasons_of(asking)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_request_that_reaches_a_paused_engine_starts_later_and_is_not_aborted(
    subject: Subject, client: GenerateClient, control: EngineControl, mode: Any
) -> None:
    call(subject.url, READY, timeout_s=120)
    control.pause(mode)
    with pytest.raises(WeightSyncError, match="status 503"):
        call(subject.url, READY, timeout_s=120)
    asking = asyncio.create_task(client.generate([3, 4], sampling=SamplingParams(max_new_tokens=4, ignore_eos=True)))
    await asyncio.sleep(0.3)
    subject.end_all()
    await asyncio.sleep(0.3)
    assert (asking.done(), control.version()) == (False, "default")
    control.resume()
    (answer,) = await asking
    assert answer.finish_reason in ("stop", "length")


async def test_a_client_that_ends_its_requests_ends_those_too_that_a_paused_engine_held(
    client: GenerateClient, control: EngineControl, subject: Subject
) -> None:
    if subject.fake is not None:
        subject.fake.delay_s = 60
    reasons: set[str] = set()
    while "abort" not in reasons:
        control.pause("in_place")
        asking = [asyncio.create_task(client.generate([3, 8, 4], sampling=LONG)) for _ in range(MANY)]
        await asyncio.sleep(0.3)
        async with client.aborting():
            control.resume()
            reasons = await reasons_of(asking)


def test_the_cache_can_be_flushed_also_while_the_engine_is_paused(control: EngineControl) -> None:
    control.flush_cache()
    control.pause("retract")
    control.flush_cache()
    control.resume()


def test_an_update_session_opens_once_and_closes_once(control: EngineControl) -> None:
    control.begin_update()
    with pytest.raises(WeightSyncError, match=r"status 400: .*already open"):
        control.begin_update()
    with pytest.raises(WeightSyncError, match=r"status 400: .*Group g not in \[\]"):
        control.update_from_distributed(BUCKET, group="g", send=Never)
    control.end_update()
    with pytest.raises(WeightSyncError, match=r"/end_weight_update .*status 400: .*session"):
        control.end_update()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda control: control.update_from_distributed(BUCKET, group="g", send=Never), "begin_weight_update"),
        (lambda control: control.update_from_tensor([["AAAA"]]), "begin_weight_update"),
        (lambda control: control.destroy_group("g"), "does not exist"),
    ],
    ids=["weights", "shared weights", "leaving an unknown group"],
)
def test_what_has_not_been_begun_is_refused(control: EngineControl, act: Any, said: str) -> None:
    with pytest.raises(WeightSyncError, match=f"status 400: .*{said}"):
        act(control)


def test_a_folder_without_weights_is_refused_and_changes_nothing(control: EngineControl, tmp_path: Path) -> None:
    held = control.checksum()
    for folder in (tmp_path, tmp_path / "not there"):
        with pytest.raises(WeightSyncError, match=r"/update_weights_from_disk .*status 400: "):
            control.update_from_disk(folder, version="9")
    assert (control.version(), control.checksum()) == ("default", held)


def test_spoiled_weights_differ_until_they_are_loaded_again(control: EngineControl) -> None:
    (held,) = control.checksum()
    assert control.checksum() == (held,)
    assert len(held.total) == 64
    assert {len(digest) for digest in held.ranks[0].values()} == {held.digits} <= {SHA_DIGITS, XXH3_DIGITS}
    control.overwrite()
    (spoiled,) = control.checksum()
    assert all(spoiled.ranks[0][name] != digest for name, digest in held.ranks[0].items())
    control.update_from_disk(MODEL, version="default")
    assert control.checksum() == (held,)


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


class Never:
    """A broadcast that must not be waited for."""

    def wait(self) -> None:
        raise AssertionError("no engine receives")


async def test_tool_calls_of_known_functions_are_found_in_a_text(subject: Subject) -> None:
    add = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    text = (
        'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name"\n</tool_call>'
    )
    body = {"text": text, "tools": [add], "tool_call_parser": "qwen25"}
    parsed = call(subject.url, "/parse_function_call", body, timeout_s=120)
    assert parsed == {"normal_text": "Hm.", "calls": [{"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}]}
    without = call(subject.url, "/parse_function_call", body | {"text": "none"}, timeout_s=120)
    assert without == {"normal_text": "none", "calls": []}
    with pytest.raises(WeightSyncError, match="status 500"):
        call(subject.url, "/parse_function_call", body | {"tool_call_parser": "nonesuch"}, timeout_s=120)
