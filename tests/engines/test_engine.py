"""The real SGLang server and the real router, with the built-in checkpoint in fp32."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.config.secrets import engine_access
from slime_core.errors import EngineError
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.context import run_all
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings, SGLangServer, Worker
from slime_core.rollout.engines.server import is_hung
from slime_core.weights import PublisherSettings
from slime_core.weights.engine_control import EngineControl
from slime_core.weights.publisher import Publisher
from slime_testing.fake_engine import FakeEngine
from tests.engines.conftest import registered
from tests.processes import children

PROMPT = [3, 8, 12, 15, 9, 10, 4]
"""``37+45`` in the chat template of the embedded model."""

PROMPTS = [PROMPT, [3, 9, 10, 4], [3, 5, 6, 15, 7, 7, 4]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=110, ignore_eos=True)


@torch.no_grad()
def reference(model: torch.nn.Module, prompt: list[int], answer: Generation) -> tuple[list[int], list[float]]:
    """The likeliest token at every step of ``answer``, and the log-probabilities of its own tokens."""
    ids = torch.tensor([*prompt, *answer.token_ids])
    log_probs_TV = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1].float(), -1)
    sampled = log_probs_TV.gather(1, ids[len(prompt) :, None])[:, 0]
    return log_probs_TV.argmax(-1).tolist(), sampled.tolist()


def weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def changed(model: torch.nn.Module, seed: int) -> list[tuple[str, torch.Tensor]]:
    noise = torch.Generator().manual_seed(seed)
    return [(name, weight + 0.1 * torch.randn(weight.shape, generator=noise)) for name, weight in weights(model)]


# --- The key of the run -----------------------------------------------------------------------------------------------

ENGINE_CALLS = ["/generate", "/update_weights_from_disk", "/weights_checker", "/v1/chat/completions", "/server_info"]
ROUTER_CALLS = ["/generate", "/v1/chat/completions", "/workers", "/flush_cache", "/get_model_info"]


def test_without_the_key_an_engine_and_a_router_answer_401_and_only_say_that_they_live(engine: Any) -> None:
    def status(url: str, path: str, **headers: str) -> int:
        body = None if path in ("/server_info", "/workers", "/get_model_info") else b"{}"
        sent = urllib.request.Request(url + path, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(sent, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for server, calls in ((engine.server, ENGINE_CALLS), (engine.router, ROUTER_CALLS)):
        for path in calls:
            found = [status(server.url, path), status(server.url, path, Authorization="Bearer wrong")]
            assert found == [401, 401], (server, path)
    with urllib.request.urlopen(f"{engine.router.url}/liveness", timeout=30) as live:
        assert live.status == 200
    assert engine.router.healthy_workers() == [engine.server.url]


def test_no_log_and_no_command_line_shows_the_key(engine: Any) -> None:
    logs = "".join(file.read_text() for file in engine.logs.iterdir())
    assert "'api_key': '***'" in logs
    lines = [Path(f"/proc/{one.pid}/cmdline") for one in psutil.Process().children(recursive=True)]
    shown = logs + "".join(line.read_text() for line in lines if line.exists())
    assert engine_access().key_text
    assert engine_access().key_text not in shown


def test_an_engine_hangs_where_its_scheduler_stands_still_and_not_where_it_is_paused(
    engine: Any, control: EngineControl
) -> None:
    (scheduler,) = children("sglang::scheduler", map(psutil.Process, engine.server.running()))
    assert not is_hung(engine.server.url, limit_s=60)
    control.pause("in_place")
    assert not is_hung(engine.server.url, limit_s=60)
    scheduler.suspend()
    try:
        assert not is_hung(engine.server.url, limit_s=1)
        scheduler.resume()
        control.resume()
        scheduler.suspend()
        assert is_hung(engine.server.url, limit_s=1)
    finally:
        scheduler.resume()
    assert not is_hung(engine.server.url, limit_s=60)


# --- Generation -------------------------------------------------------------------------------------------------------


def test_a_server_imports_no_file_of_a_model_that_it_does_not_serve(engine: Any) -> None:
    # Of some 250, a dozen need what is not here, and SGLang says so of each.
    assert "when loading sglang.srt.models" not in engine.server.settings.log_file.read_text()


async def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    client: GenerateClient, model: torch.nn.Module
) -> None:
    answers = await run_all(client.generate(ids, sampling=GREEDY) for ids in PROMPTS)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        likeliest, log_probs = reference(model, prompt, answer)
        assert list(answer.token_ids) == likeliest
        assert list(answer.log_probs) == pytest.approx(log_probs, abs=1e-3)


async def test_aborted_responses_resume_to_what_they_would_have_been(client: GenerateClient) -> None:
    greedy = replace(LONG, temperature=0)
    (whole,) = await client.generate([3, 8, 4], sampling=greedy)
    ended: list[Generation] = []
    while not ended:  # a busy machine may have let all of them end by themselves
        requests = [asyncio.create_task(client.generate([3, 8, 4], sampling=greedy)) for _ in range(48)]
        # Queued after them: once it is answered, they have started.
        await client.generate([3, 8, 4], sampling=SamplingParams(max_new_tokens=1))
        async with client.aborting():
            answers = [answer for (answer,) in await asyncio.gather(*requests)]
        ended = [answer for answer in answers if answer.finish_reason == "abort" and answer.token_ids]
    aborted = ended[0]
    assert len(aborted.log_probs) == len(aborted.token_ids) < 110
    rest = replace(greedy, max_new_tokens=110 - len(aborted.token_ids))
    (more,) = await client.generate([3, 8, 4, *aborted.token_ids], sampling=rest)
    assert [*aborted.token_ids, *more.token_ids] == list(whole.token_ids)
    assert [*aborted.log_probs, *more.log_probs] == pytest.approx(list(whole.log_probs), abs=1e-3)


# --- Weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def publisher(engine: Any, model: torch.nn.Module, request: pytest.FixtureRequest) -> Iterator[Publisher]:
    mode: Any = getattr(request, "param", "retract")
    settings = PublisherSettings(model=engine.model, bytes_limit=64 * 1024, timeout_s=120, pause_mode=mode)
    publisher = Publisher([engine.server.url], settings=settings, weights=weights(model), sends=True)
    yield publisher
    publisher.publish(weights(model), version="default")
    publisher.close()


async def over_an_update(publisher: Publisher, client: GenerateClient, model: torch.nn.Module) -> list[Generation]:
    """Some of the long responses that were partly sampled when version 2 of ``model`` was published."""
    answers: list[Generation] = []
    published = asyncio.Event()

    async def ask(first: int) -> None:
        # The first one of each is of another length, so that ever after they are at different tokens.
        answers.extend(await client.generate(PROMPT, sampling=replace(LONG, max_new_tokens=first)))
        while not published.is_set():
            answers.extend(await client.generate(PROMPT, sampling=LONG))

    asking = [asyncio.create_task(ask(6 * number)) for number in range(1, 17)]
    while len(answers) < len(asking):
        await asyncio.sleep(0.01)
    # From here on most of them have one under way, however long it takes until the engine hears of the update.
    await asyncio.to_thread(publisher.publish, weights(model), version="2")
    published.set()
    await asyncio.gather(*asking)
    early = [one for one in answers if one.weight_versions[:1] == ("default",) and one.token_ids]
    met = [answer for answer in early if len(answer.weight_versions) > 1 or answer.finish_reason != "length"]
    assert met
    return met[:3]


def other_model(engine: Any, model: torch.nn.Module) -> torch.nn.Module:
    other: torch.nn.Module = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()
    other.load_state_dict(dict(changed(model, seed=2)))
    return other


@pytest.mark.parametrize(
    ("publisher", "is_recomputed"), [("retract", True), ("in_place", False)], indirect=["publisher"]
)
async def test_a_response_continues_over_a_weight_update_and_records_the_version_of_each_token(
    publisher: Publisher,
    client: GenerateClient,
    control: EngineControl,
    engine: Any,
    model: torch.nn.Module,
    is_recomputed: bool,
) -> None:
    other = other_model(engine, model)
    answers = await over_an_update(publisher, client, other)
    control.pause("retract")
    control.flush_cache()  # in place, the update does not flush it
    control.resume()
    sampled, expected = [], []
    for answer in answers:
        change = answer.weight_spans[0][2]
        assert answer.weight_spans == (("default", 0, change), ("2", change, 110))
        assert (len(answer.token_ids), answer.weight_versions) == (110, ("default", "2"))
        before, after = reference(model, PROMPT, answer)[1], reference(other, PROMPT, answer)[1]
        assert list(answer.log_probs)[:change] == pytest.approx(before[:change], abs=1e-3)
        sampled += list(answer.log_probs)[change:]
        expected += after[change:]
    # Recomputed, the tokens after the update are exactly those of the new weights; in place, of neither.
    assert (sampled == pytest.approx(expected, abs=1e-3)) is is_recomputed


@pytest.mark.parametrize("publisher", ["abort"], indirect=True)
async def test_a_response_that_an_update_aborts_comes_back_with_what_it_has(
    publisher: Publisher, client: GenerateClient, engine: Any, model: torch.nn.Module
) -> None:
    answers = await over_an_update(publisher, client, other_model(engine, model))
    for answer in answers:
        assert (answer.finish_reason, answer.weight_versions) == ("abort", ("default",))
        assert 0 < len(answer.token_ids) < 110
        assert list(answer.log_probs) == pytest.approx(reference(model, PROMPT, answer)[1], abs=1e-3)


# --- Pauses and deaths ------------------------------------------------------------------------------------------------


def test_a_paused_engine_leaves_its_core_to_the_learner(control: EngineControl, engine: Any) -> None:
    control.pause()
    scheduler = scheduler_of(engine.server)
    before = sum(scheduler.cpu_times()[:2])
    time.sleep(2)
    used = sum(scheduler.cpu_times()[:2]) - before
    control.resume()
    assert used < 0.5


async def test_a_paused_engine_stays_in_the_router_and_holds_requests(
    client: GenerateClient, control: EngineControl, engine: Any
) -> None:
    control.pause("retract")
    asking = asyncio.create_task(client.generate(PROMPT, sampling=GREEDY))
    await asyncio.sleep(5)  # two looks, whose failure would be enough
    assert engine.router.healthy_workers() == [engine.server.url]
    assert not asking.done()
    control.resume()
    assert len(await asking) == 1


@pytest.mark.parametrize("in_common", [0, 48, 91], ids=lambda count: f"{count} of 96 tokens in common")
async def test_engines_get_equally_many_requests_of_prompts_with_a_common_start(in_common: int, tmp_path: Path) -> None:
    prompts = [[5] * in_common + [6 + number % 8] * (96 - in_common) for number in range(64)]
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(vocab_size=16, context_length=256)) for _ in range(4)]
        router = stack.enter_context(Router(RouterSettings(tmp_path / "log")))
        router.wait_ready()
        registered(router, *(Worker(engine.url) for engine in engines))
        control = EngineControl([engine.url for engine in engines])
        control.pause()  # no request ends before all have arrived
        async with GenerateClient(router.url, timeout_s=120, vocab_size=16) as client:
            answers = asyncio.gather(*(client.generate(ids, sampling=GREEDY, n=8) for ids in prompts))
            while sum(len(engine.bodies) for engine in engines) < len(prompts):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(control.resume)
            await answers
        control.close()
        assert all(abs(len(engine.bodies) - 16) <= 1.6 for engine in engines)


@pytest.fixture(scope="module")
def second(engine: Any) -> Iterator[SGLangServer]:
    """Another engine of the same router, which the test kills."""
    settings = EngineSettings(engine.model, engine.logs / "second.log", name="engine 1", dtype="float32")
    with SGLangServer(settings) as server:
        server.wait_ready()
        engine.router.add([Worker(server.url)])
        engine.router.wait_registered([server.url])
        yield server
        engine.router.remove(server.url)


async def test_requests_of_a_killed_engine_are_answered_by_another(
    client: GenerateClient, second: SGLangServer
) -> None:
    scheduler = scheduler_of(second)
    scheduler.suspend()
    asking = [asyncio.create_task(client.generate([3, *[9] * nines, 4], sampling=LONG)) for nines in range(1, 9)]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)  # the other engine answers; this one holds its own
    scheduler.kill()
    assert [len(answer.token_ids) for (answer,) in await asyncio.gather(*asking)] == [110] * 8
    assert await asyncio.to_thread(second.wait_end, 120)
    with pytest.raises(EngineError, match=r"engine 1 (.|\n)*second.log"):
        second.check_alive()


def scheduler_of(server: SGLangServer) -> psutil.Process:
    port = f"--port={server.url.rsplit(':')[-1]}"
    (front,) = children(port)
    (scheduler,) = children("sglang::scheduler", of=front.children(recursive=True))
    return scheduler
