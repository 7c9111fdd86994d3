"""Agents written against the official client, unchanged: their answers, and what is trained of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_agents.openai_agent import OpenAIAgent
from slime_agents.options import AgentsOptions
from slime_core.errors import EngineError
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine
from slime_testing.harness import default_run_view

SAMPLING = SamplingParams(max_new_tokens=500, stop=("END",))
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
UNKNOWN = CALL.replace("add", "sum")
Agent = Callable[..., Any]


def client(access: Mapping[str, str]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)


async def create(access: Mapping[str, str], **fields: Any) -> Any:
    async with client(access) as api:
        return await api.chat.completions.create(**({"model": "any", "messages": [user("q")]} | fields))


async def ask(access: Mapping[str, str], *messages: Any, **fields: Any) -> Any:
    """Return the message of the answer; a text is a user's message."""
    history = [user(message) if isinstance(message, str) else message for message in messages]
    return (await create(access, messages=history, **fields)).choices[0].message


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result_of(message: Any, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": content}


def sends(*requests: list[Any], returns: object = None, **fields: Any) -> Agent:
    """An agent that sends ``requests``; a number in one stands for the answer to that request."""

    async def agent(task: Any, **access: str) -> object:
        answers: list[Any] = []
        for request in requests:
            history = [answers[message] if isinstance(message, int) else message for message in request]
            answers.append(await ask(access, *history, **fields))
        return returns

    return agent


def function(agent: Agent, **options: Any) -> OpenAIAgent:
    run = replace(default_run_view(), settings={"max_turns": options.pop("max_turns", None)})
    generate = OpenAIAgent(AgentsOptions(**options), run)
    generate._agent = agent
    return generate


async def run(context: GenerateContext, agent: Agent, sample: Sample | None = None, **options: Any) -> list[Sample]:
    sample = sample or Sample(prompt="37+45", index=3, group_index=1, label="82")
    return await asyncio.wait_for(function(agent, **options)(context, sample, SAMPLING), 60)


def text(sample: Sample, start: int = 0) -> str:
    return "".join(map(chr, list(sample.tokens)[start:]))


def trained(sample: Sample) -> str:
    """The response, a dot for each token that is not trained."""
    mask = list(sample.loss_mask or [1] * sample.response_length)
    response = text(sample, sample.prompt_length)
    return "".join(letter if on else "." for letter, on in zip(response, mask, strict=True))


async def test_an_agent_with_tools_is_trained_on_the_ids_that_the_engine_sampled(
    context: GenerateContext, says: Callable[..., None], engine: FakeEngine
) -> None:
    says(f"So.\n{CALL}", "82")
    choices = []

    async def agent(task: Any, **access: str) -> float:
        messages: list[Any] = [user(task.prompt)]
        while True:
            choice = (await create(access, messages=messages, tools=[ADD], temperature=0.3)).choices[0]
            choices.append(choice)
            if choice.finish_reason != "tool_calls":
                return float(choice.message.content == task.label)
            messages += [choice.message, result_of(choice.message, "82")]

    (sample,) = await run(context, agent)
    assert (choices[0].message.content, choices[0].finish_reason) == ("So.", "tool_calls")
    (call,) = choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert text(sample) == f"{{add}}[u:37+45]>So.\n{CALL}\x01[t:82]>82\x01"
    assert trained(sample) == f"So.\n{CALL}\x01" + "." * 7 + "82\x01"
    # Identity: what is trained is what the engine read and returned, request by request.
    assert [*engine.sampled[-1][0], *engine.sampled[-1][1]] == list(sample.tokens)
    assert (sample.reward, sample.status, sample.rollout_id) == (1.0, Status.COMPLETED, None)
    assert sample.metadata["agent"] == {"branches": 1}
    assert all(body["sampling_params"]["temperature"] == 1.0 for body in engine.bodies)


# --- Branches ---------------------------------------------------------------------------------------------------------

OTHER, SAME = {"role": "assistant", "content": "other"}, {"role": "assistant", "content": "one"}


@pytest.mark.parametrize(
    ("requests", "expected", "counters"),
    [
        (
            [["q"], ["q", 0, "a"], ["q", 0, "b"]],
            [("[u:q]>", "one\x01......two\x01"), ("[u:q]>", "..........three\x01")],
            {"branches": 2},
        ),
        ([["q"], ["q", OTHER, "b"]], [("[u:q]>", "one\x01"), ("[u:q][", "two\x01")], {"branches": 2, "edited": 1}),
        ([["q"], [SAME, "b"]], [("[u:q]>", "one\x01"), ("[a:one]", "two\x01")], {"branches": 2, "truncated": 1}),
        (
            [["q"], [{"role": "system", "content": "s"}, "r"]],
            [("[u:q]>", "one\x01"), ("[s:s][u:r]>", "two\x01")],
            {"branches": 2},
        ),
    ],
    ids=["retry and edit of the newest message", "edited history", "truncated history", "sub-agent"],
)
async def test_a_history_that_was_recorded_is_continued_and_another_is_a_branch(
    context, says, requests, expected, counters
) -> None:
    says("one", "two", "three")
    samples = await run(context, sends(*requests))
    assert [trained(sample) for sample in samples] == [response for _, response in expected]
    assert [text(sample).startswith(start) for sample, (start, _) in zip(samples, expected, strict=True)] == [True] * 2
    assert [(sample.index, sample.rollout_id) for sample in samples] == [(3, 3), (3, 3)]
    assert samples[0].metadata["agent"] == counters


async def test_parallel_requests_of_one_history_are_branches(context, says) -> None:
    says("one", "two", "three")

    async def agent(task: Any, **access: str) -> None:
        first = await ask(access, "q")
        await asyncio.gather(*(ask(access, "q", first, "a") for _ in range(2)))

    samples = await run(context, agent)
    assert sorted(map(trained, samples)) == sorted(["one\x01......two\x01", "." * 10 + "three\x01"])


async def test_several_choices_are_branches_that_can_be_continued(context, says) -> None:
    says("one", "two", "three")

    async def agent(task: Any, **access: str) -> None:
        answer = await create(access, n=2)
        await ask(access, "q", answer.choices[1].message, "a")

    samples = await run(context, agent)
    assert [text(sample) for sample in samples] == ["[u:q]>one\x01", "[u:q]>two\x01[u:a]>three\x01"]
    assert [trained(sample) for sample in samples] == ["one\x01", "two\x01......three\x01"]


async def test_a_client_that_writes_the_same_message_otherwise_continues_it(context, says) -> None:
    says(f" one\n{CALL}", "two")

    async def agent(task: Any, **access: str) -> None:
        first = await ask(access, "q", tools=[ADD])
        call = {"id": first.tool_calls[0].id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        again = {"role": "assistant", "content": [{"type": "text", "text": "one"}], "tool_calls": [call]}
        await ask(access, "q", again, result_of(first, "3"), tools=[ADD])

    (sample,) = await run(context, agent)
    assert trained(sample).endswith("......two\x01")


# --- Rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn_rewards", "expected"),
    [
        ("last", [("one\x01......two\x01", 0.25)]),
        ("own", [("one\x01", 1.0), ("..........two\x01", 0.25)]),
        ("following", [("one\x01", 1.25), ("..........two\x01", 0.25)]),
    ],
)
async def test_an_agent_may_give_each_answer_a_reward(context, says, turn_rewards, expected) -> None:
    says("one", "two")
    samples = await run(context, sends(["q"], ["q", 0, "a"], returns=[1, 0.25]), turn_rewards=turn_rewards)
    assert [(trained(sample), sample.reward) for sample in samples] == expected
    assert {sample.rollout_id for sample in samples} == {3 if len(samples) > 1 else None}
    assert samples[0].metadata["agent"] == {"branches": 1}


async def test_answers_of_branches_have_their_rewards_in_the_order_of_the_requests(context, says) -> None:
    says("one", "two", "three")
    samples = await run(context, sends(["q"], ["r"], ["q", 0, "a"], returns=[1, 2, 3]), turn_rewards="own")
    rewards = {trained(sample).strip("."): sample.reward for sample in samples}
    assert rewards == {"one\x01": 1.0, "three\x01": 3.0, "two\x01": 2.0}


async def test_an_agent_that_is_no_coroutine_runs_in_a_thread(context, says) -> None:
    says("82")

    def agent(task: Any, base_url: str, api_key: str, model: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as api:
            answer = api.chat.completions.create(model=model, messages=[{"role": "user", "content": task.prompt}])
        return float(answer.choices[0].message.content == task.label)

    assert [sample.reward for sample in await run(context, agent)] == [1.0]


# --- Calls of tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [UNKNOWN, CALL.replace("1", "1,,"), f"<think>no</think>{UNKNOWN}"])
async def test_a_call_that_the_agent_cannot_run_is_answered_before_the_agent_sees_it(context, says, turn) -> None:
    says(turn, f"So.{CALL}", "82")
    answers = []

    async def agent(task: Any, **access: str) -> list[float]:
        answer = await create(access, tools=[ADD])
        message = answer.choices[0].message
        answers.append((message.content, [call.function.name for call in message.tool_calls], answer.usage))
        answers.append((await ask(access, "q", message, result_of(message, "3"), tools=[ADD])).content)
        return [0.5, 1.0]

    samples = await run(context, agent, turn_rewards="own")
    assert answers[0][:2] == ("So.", ["add"])
    assert answers[0][2].completion_tokens == len(turn) + len(f"So.{CALL}") + 2
    assert answers[1] == "82"
    assert [sample.reward for sample in samples] == [0.5, 0.5, 1.0]
    assert "[t:error: " in text(samples[-1])
    assert text(samples[-1]).endswith("[t:3]>82\x01")


async def test_an_unknown_call_beside_a_known_one_is_answered_with_the_agents_results(context, says) -> None:
    says(f"{UNKNOWN}\n{CALL}", "82")
    names = []

    async def agent(task: Any, **access: str) -> None:
        message = await ask(access, "q", tools=[ADD])
        names.extend(call.function.name for call in message.tool_calls)
        await ask(access, "q", message, result_of(message, "3"), "now", tools=[ADD])

    (sample,) = await run(context, agent)
    assert names == ["add"]
    assert "'sum'; there are: add][t:3][u:now]>82\x01" in text(sample)


async def test_turns_with_invalid_calls_count(context, says, engine: FakeEngine) -> None:
    says(UNKNOWN, UNKNOWN, UNKNOWN)
    await run(context, sends(["q"], tools=[ADD]), max_turns=2)
    assert len(engine.sampled) == 2


async def test_a_call_inside_thoughts_does_not_reach_the_agent(context, says) -> None:
    says(f"<think>{CALL}</think>The answer is 4.")

    async def agent(task: Any, **access: str) -> float:
        message = await ask(access, "q", tools=[ADD])
        return float(message.tool_calls is None and message.content.endswith("The answer is 4."))

    assert [sample.reward for sample in await run(context, agent)] == [1.0]


# --- Requests ---------------------------------------------------------------------------------------------------------


async def test_a_stream_holds_the_same_answer_and_its_usage_only_if_the_client_asks(context, says) -> None:
    says(f"So.\n{CALL}", "two", "three")
    streams: list[list[Any]] = []

    async def agent(task: Any, **access: str) -> None:
        async with client(access) as api:
            for shows_usage in (True, False, None):
                request: Any = {"model": "any", "messages": [user("q")], "tools": [ADD]}
                if shows_usage is not None:
                    request["stream_options"] = {"include_usage": shows_usage}
                stream = await api.chat.completions.create(stream=True, **request)
                streams.append([part async for part in stream])

    await run(context, agent)
    choices = [choice for part in streams[0] for choice in part.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "So."
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert streams[0][-1].usage.completion_tokens > 0
    assert [[bool(part.choices) for part in stream].count(False) for stream in streams] == [1, 0, 0]
    assert [stream[-1].usage is not None for stream in streams] == [True, False, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_connection_is_left_idle_for_the_pool_that_agents_share_to_look_at(context, says, stream) -> None:
    says("one")
    headers = []

    async def agent(task: Any, **access: str) -> None:
        async with client(access) as api:
            completions: Any = api.chat.completions.with_raw_response
            answer = await completions.create(model="any", messages=[user("q")], stream=stream)
            headers.append(answer.headers["connection"])

    await run(context, agent)
    assert headers == ["close"]


async def test_a_stop_text_and_a_limit_of_the_request_hold(context, says, engine: FakeEngine) -> None:
    says("one;", "three")
    answers = []

    async def agent(task: Any, **access: str) -> None:
        answers.append((await ask(access, "q", stop=";")).content)
        answers.append((await create(access, max_tokens=2)).choices[0].finish_reason)

    await run(context, agent)
    assert answers == ["one", "length"]
    assert engine.bodies[0]["sampling_params"]["stop"] == ["END", ";"]


async def test_fields_that_change_nothing_are_accepted(context, says) -> None:
    says("one")
    numbers = {"n": 1, "temperature": 0.2, "top_p": 0.9, "seed": 4, "frequency_penalty": 0, "presence_penalty": 0.0}
    neutral = {"logit_bias": {}, "logprobs": False, "top_logprobs": 0, "parallel_tool_calls": True, "stop": None}
    texts = {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto", "user": "me"}
    unused = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    (sample,) = await run(context, sends(["q"], **numbers, **neutral, **texts, **unused))
    assert (sample.status, trained(sample)) == (Status.COMPLETED, "one\x01")


async def post(access: Mapping[str, str], **request: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    url = f"{access['base_url']}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, **request) as answer:
        return answer.status, await answer.text()


def fields(**fields: Any) -> dict[str, Any]:
    return {"json": {"model": "any", "messages": [user("q")], **fields}}


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({"data": b"\xff{"}, ""),
        ({"data": b"[" * 100_000}, ""),
        ({"json": []}, ""),
        (fields(messages="q"), "messages"),
        (fields(messages=[]), "messages"),
        (fields(messages=[{"content": 5}]), "messages"),
        (fields(messages=[user(None), {"role": "assistant", "tool_calls": "add"}]), "tool_calls"),
        (fields(messages=[user([{"type": "image_url", "image_url": {"url": "x"}}])]), "type"),
        (fields(n=10**30), "n: "),
        (fields(n=100), "n: "),
        (fields(max_tokens=-1), "max_tokens"),
        (fields(tools=[{"type": "function"}]), "tools"),
        (fields(logprobs=True), "logprobs"),
        (fields(response_format={"type": "json_object"}), "response_format.type"),
        (fields(tool_choice="required"), "tool_choice"),
        (fields(frequency_penalty=0.5), "frequency_penalty"),
        (fields(parallel_tool_calls=False), "parallel_tool_calls"),
        (fields(modalities=["text", "audio"]), "modalities"),
        (fields(reasoning_effort="high"), "reasoning_effort"),
        (fields(chat_template_kwargs={}), "chat_template_kwargs"),
    ],
)
async def test_a_malformed_or_unsupported_request_is_refused_and_the_rollout_continues(
    context, says, request_fields, named
) -> None:
    says("one")
    answers = []

    async def agent(task: Any, **access: str) -> float:
        answers.append(await post(access, **request_fields))
        await ask(access, "q")
        return 0.5

    (sample,) = await run(context, agent)
    assert (answers[0][0], named in answers[0][1]) == (400, True)
    assert (sample.status, sample.reward, trained(sample)) == (Status.COMPLETED, 0.5, "one\x01")


async def test_a_request_of_many_megabytes_is_not_read_and_the_rollout_continues(context, says) -> None:
    says("one")

    async def agent(task: Any, **access: str) -> None:
        with suppress(aiohttp.ClientError):  # the connection may close before all is sent
            assert (await post(access, data=BytesIO(b"x" * (17 * 2**20))))[0] == 413
        await ask(access, "q")

    (sample,) = await run(context, agent)
    assert (sample.error, sample.status, sample.response) == (None, Status.COMPLETED, "one")


async def test_another_key_reaches_nothing(context, says) -> None:
    says("one")
    accesses = []

    async def agent(task: Any, **access: str) -> None:
        with pytest.raises(openai.AuthenticationError) as refusal:
            await ask({**access, "api_key": "wrong"}, "q")
        assert refusal.value.code == "invalid_api_key"
        async with client(access) as api:
            assert [model.id for model in (await api.models.list()).data] == [access["model"]]
        await ask(access, "q")
        accesses.append(access)

    shared = function(agent)
    await asyncio.gather(*(shared(context, Sample(prompt="q", index=at), SAMPLING) for at in range(2)))
    assert len({access["api_key"] for access in accesses}) == 2
    assert len({access["base_url"] for access in accesses}) == 1


# --- Failures ---------------------------------------------------------------------------------------------------------


async def broken(task: Any, **access: str) -> None:
    raise KeyError("gone")


async def hangs(task: Any, **access: str) -> None:
    await asyncio.sleep(60)


async def gives_up(task: Any, **access: str) -> None:
    await ask(access, "q", timeout=0.1)


BROKEN = f"sample 3 of group 1: KeyError: 'gone' ({__file__}:{broken.__code__.co_firstlineno + 1}, in broken)"


@pytest.mark.parametrize(
    ("agent", "cause", "error"),
    [
        (broken, "agent_error", BROKEN),
        (hangs, "agent_timeout", "1 s"),
        (gives_up, "agent_error", "APITimeoutError"),
        (sends(), "agent_error", "no request"),
        (sends(["q"], reasoning_effort="high"), "agent_error", "reasoning_effort"),
        (sends(["r"], returns=[1.0, 2.0]), "agent_error", "2 rewards for 1"),
        (sends(["r"], returns=float("nan")), "agent_error", "nan"),
    ],
    ids=["raises", "hangs", "gives up on the engine", "no request", "refused", "wrong count", "not a number"],
)
async def test_an_agent_that_fails_fails_its_sample(context, says, engine, agent, cause, error) -> None:
    says("one")
    engine.holds = agent is gives_up
    before = Sample(prompt="q", index=3, group_index=1)
    limit_s = 0.1 if agent is hangs else 30.0
    try:
        (sample,) = await run(context, agent, before, agent_timeout_s=limit_s)
    finally:
        engine.holds = False
    assert (sample.status, sample.failure_cause) == (Status.FAILED, cause)
    assert error in str(sample.error)
    assert before == Sample(prompt="q", index=3, group_index=1)


async def test_a_client_that_hangs_up_may_ask_again(context, says, engine: FakeEngine) -> None:
    says("one", "two")
    engine.holds = True

    async def agent(task: Any, **access: str) -> None:
        asking = asyncio.create_task(ask(access, "q"))
        while not engine.bodies:
            await asyncio.sleep(0.01)
        asking.cancel()
        engine.holds = False
        await ask(access, "q")

    samples = await run(context, agent)
    assert {sample.status for sample in samples} == {Status.COMPLETED}
    assert "two" in [sample.response for sample in samples]


async def test_an_agent_that_uses_up_its_turns_or_the_context_is_trained_on_them(context, says) -> None:
    says(*["one"] * 3)

    async def endless(task: Any, **access: str) -> None:
        messages: list[Any] = ["q"]
        while True:
            messages += [await ask(access, *messages), "more " * 250]

    (sample,) = await run(context, endless, max_turns=1)
    assert (trained(sample), sample.status) == ("one\x01", Status.COMPLETED)
    (sample,) = await run(context, endless)
    assert sample.status is Status.TRUNCATED


async def test_an_aborted_turn_ends_the_rollout_which_restarts_unchanged(context, engine: FakeEngine) -> None:
    engine.aborts, engine.partial = True, 2

    async def agent(task: Any, **access: str) -> None:
        while True:
            with pytest.raises(openai.BadRequestError, match="rollout_ended"):
                await ask(access, "r")

    before = Sample(prompt="q", index=3, group_index=1)
    with pytest.raises(Interrupted) as stop:
        await run(context, agent, before)
    assert (stop.value.sample.status, list(stop.value.sample.tokens)) == (Status.ABORTED, [])
    assert before.status is Status.PENDING


async def test_an_engine_that_is_gone_is_an_error_of_the_run(context, engine: FakeEngine) -> None:
    engine.fail_with = [400]
    with pytest.raises(EngineError, match="failure set"):
        await run(context, sends(["q"]))


# --- Messages, with a real tokenizer and a template that reads text alone ---------------------------------------------

TEMPLATE = (
    "{% for tool in tools or [] %}{{ '{' + tool.function.name + '}' }}{% endfor %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role in ('system', 'user', 'assistant', 'tool') %}{{ '[' + message.role[0] + ':' + content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{{ eos_token if message.role == 'assistant' else ']' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)
"""Leaves out content in parts and the role developer, as the template of Qwen3 does."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({chr(at): at for at in range(1, 256)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\x01", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    config = {"model_type": "qwen3", "vocab_size": 256, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return PromptEncoder(Path(folder), apply_chat_template=True)


def in_parts(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts], **more}


RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}
EDITED = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}


@pytest.mark.parametrize(
    ("requests", "read"),
    [
        ([["q"], ["q", 0, in_parts("user", "Are you sure?")]], "[u:q]>42\x01[u:Are you sure?]>"),
        ([["q"], ["q", 0, in_parts("user", "Are you", "sure?")]], "[u:q]>42\x01[u:Are you\nsure?]>"),
        ([["q"], ["q", 0, "Are you sure?"]], "[u:q]>42\x01[u:Are you sure?]>"),
        ([["q"], ["q", 0, in_parts("tool", "it is", tool_call_id="x")]], "[u:q]>42\x01[t:it is]>"),
        ([[in_parts("developer", "Be brief."), "q"]], "[s:Be brief.][u:q]>"),
        *(
            ([["q", {**EDITED, "content": content}, RESULT]], '[u:q][a:add{"a": 1}\x01[t:3]>')
            for content in (None, "", in_parts("user", "")["content"])
        ),
    ],
)
async def test_messages_in_every_form_reach_the_model(engine, says, context, encoder, requests, read) -> None:
    says("42", "yes")
    (sample,) = await run(replace(context, encoder=encoder), sends(*requests))
    assert "".join(map(chr, engine.sampled[-1][0])) == read
    assert sample.status is Status.COMPLETED


async def test_a_message_that_the_template_leaves_out_is_refused_and_named_by_the_sample(
    engine, says, context, encoder
) -> None:
    says("42")
    observation = {"role": "observation", "content": "It rains."}
    (sample,) = await run(replace(context, encoder=encoder), sends(["q"], ["q", 0, observation, "r"]))
    assert (sample.status, sample.failure_cause) == (Status.FAILED, "agent_error")
    assert "400" in str(sample.error)
    assert "observation" in str(sample.error)
    assert len(engine.sampled) == 1
