"""Agents written against the official client, unchanged: what they get, and what is trained of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import openai
import pytest

from slime_agents.openai_agent import OpenAIAgent
from slime_agents.options import AgentsOptions
from slime_core.errors import EngineError
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.harness import default_run_view
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

SAMPLING = SamplingParams(max_new_tokens=500, stop=("END",))
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def client(access: Mapping[str, str]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)


async def create(access: Mapping[str, str], **given: Any) -> Any:
    async with client(access) as one:
        return await one.chat.completions.create(**({"model": "any"} | given))


async def run(
    context: GenerateContext, agent: Callable[..., object], sample: Sample | None = None, **options: Any
) -> list[Sample]:
    given = sample or Sample(prompt="37+45", index=3, group_index=1, label="82")
    return await function(agent, **options)(context, given, SAMPLING)


def function(agent: Callable[..., object], **options: Any) -> OpenAIAgent:
    run = replace(default_run_view(), settings={"max_turns": options.pop("max_turns", None)})
    made = OpenAIAgent(AgentsOptions(**options), run)
    made._agent = agent
    return made


def text(sample: Sample) -> str:
    return bytes(list(sample.tokens)).decode()


def trained(sample: Sample) -> str:
    """The response, a dot for each token that is not trained."""
    mask = list(sample.loss_mask or [1] * sample.response_length)
    ids = list(sample.tokens)[sample.prompt_length :]
    return "".join(chr(one) if on else "." for one, on in zip(ids, mask, strict=True))


async def test_an_agent_with_tools_is_trained_on_the_ids_that_the_engine_sampled(context, says, engine) -> None:
    says(f"So.\n{CALL}", "82")
    replies = []

    async def agent(task, **access: str) -> float:
        messages: list[Any] = [{"role": "user", "content": task.prompt}]
        while True:
            answer = await create(access, messages=messages, tools=[ADD], temperature=0.3)
            choice = answer.choices[0]
            replies.append(choice)
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                return float(choice.message.content == task.label)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "82"} for call in choice.message.tool_calls
            ]

    (sample,) = await run(context, agent)
    assert (replies[0].message.content, replies[0].finish_reason) == ("So.", "tool_calls")
    (call,) = replies[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert text(sample) == f"{{add}}[u:37+45]>So.\n{CALL}\x01[t:82]>82\x01"
    assert trained(sample) == f"So.\n{CALL}\x01" + "." * 7 + "82\x01"
    # Identity: what is trained is what the engine read and returned, request by request.
    assert [[*prompt, *response] for prompt, response in engine.sampled][-1] == list(sample.tokens)
    assert (sample.reward, sample.status, sample.rollout_id) == (1.0, Status.COMPLETED, None)
    assert sample.metadata["agent"] == {"branches": 1}
    assert all(body["sampling_params"]["temperature"] == 1.0 for body in engine.bodies)


async def ask(access: Mapping[str, str], messages: list[Any], **more: Any) -> Any:
    answer = await create(access, messages=messages, **more)
    return answer.choices[0].message


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def test_a_retry_and_an_edit_of_the_newest_message_branch_from_the_recorded_ids(context, says) -> None:
    says("one", "two", "three")

    async def agent(task, **access: str) -> None:
        first = await ask(access, [user("q")])
        await ask(access, [user("q"), first, user("a")])
        await ask(access, [user("q"), first, user("b")])

    samples = await run(context, agent)
    assert [text(one) for one in samples] == ["[u:q]>one\x01[u:a]>two\x01", "[u:q]>one\x01[u:b]>three\x01"]
    assert [trained(one) for one in samples] == ["one\x01......two\x01", "..........three\x01"]
    assert [(one.index, one.rollout_id) for one in samples] == [(3, 3), (3, 3)]
    assert samples[0].metadata["agent"] == {"branches": 2}


async def test_parallel_requests_of_one_history_are_branches(context, says) -> None:
    says("one", "two", "three")

    async def agent(task, **access: str) -> None:
        first = await ask(access, [user("q")])
        await asyncio.gather(*(ask(access, [user("q"), first, user("a")]) for _ in range(2)))

    samples = await run(context, agent)
    assert sorted(trained(one) for one in samples) == sorted(["one\x01......two\x01", "." * 10 + "three\x01"])


async def test_several_choices_are_branches_that_can_be_continued(context, says) -> None:
    says("one", "two", "three")

    async def agent(task, **access: str) -> None:
        answer = await create(access, messages=[user("q")], n=2)
        await ask(access, [user("q"), answer.choices[1].message, user("a")])

    samples = await run(context, agent)
    assert [text(one) for one in samples] == ["[u:q]>one\x01", "[u:q]>two\x01[u:a]>three\x01"]
    assert [trained(one) for one in samples] == ["one\x01", "two\x01......three\x01"]


@pytest.mark.parametrize(
    ("history", "cause"),
    [
        ([user("q"), {"role": "assistant", "content": "another"}, user("b")], "edited"),
        ([{"role": "assistant", "content": "one"}, user("b")], "truncated"),
    ],
)
async def test_a_history_that_was_not_recorded_is_a_conversation_of_its_own(context, says, history, cause) -> None:
    says("one", "two")

    async def agent(task, **access: str) -> None:
        await ask(access, [user("q")])
        await ask(access, history)

    samples = await run(context, agent)
    assert [trained(one) for one in samples] == ["one\x01", "two\x01"]
    assert samples[0].metadata["agent"] == {"branches": 2, cause: 1}


async def test_a_sub_agent_with_its_own_prompt_is_no_break(context, says) -> None:
    says("one", "two")

    async def agent(task, **access: str) -> None:
        await ask(access, [user("q")])
        await ask(access, [{"role": "system", "content": "s"}, user("r")])

    samples = await run(context, agent)
    assert [text(one) for one in samples] == ["[u:q]>one\x01", "[s:s][u:r]>two\x01"]
    assert samples[0].metadata["agent"] == {"branches": 2}


async def test_a_client_that_writes_the_same_message_otherwise_continues_it(context, says) -> None:
    says(f" one\n{CALL}", "two")

    async def agent(task, **access: str) -> None:
        first = await ask(access, [user("q")], tools=[ADD])
        call = first.tool_calls[0]
        function = {"name": "add", "arguments": '{"a":1}'}
        again = {
            "role": "assistant",
            "content": [{"type": "text", "text": "one"}],
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
        await ask(access, [user("q"), again, {"role": "tool", "tool_call_id": call.id, "content": "3"}], tools=[ADD])

    (sample,) = await run(context, agent)
    assert trained(sample).endswith("......two\x01")


async def test_a_stream_holds_the_same_answer(context, says) -> None:
    says(f"So.\n{CALL}")
    parts: list[Any] = []

    async def agent(task, **access: str) -> None:
        async with client(access) as one:
            request: Any = {"model": "any", "messages": [user("q")], "tools": [ADD]}
            stream = await one.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request)
            parts.extend([part async for part in stream])

    await run(context, agent)
    assert "".join(choice.delta.content or "" for part in parts for choice in part.choices) == "So."
    (call,) = [one for part in parts for choice in part.choices for one in choice.delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
    assert [one.finish_reason for part in parts for one in part.choices if one.finish_reason] == ["tool_calls"]
    assert parts[-1].usage.completion_tokens > 0


async def test_a_stream_ends_with_its_usage_only_if_the_client_asks(context, says) -> None:
    says("one", "two", "three")
    parts: list[list[Any]] = []

    async def agent(task, **access: str) -> None:
        async with client(access) as one:
            for options in (
                {},
                {"stream_options": {"include_usage": False}},
                {"stream_options": {"include_usage": True}},
            ):
                request: Any = {"model": "any", "messages": [user("q")], **options}
                stream = await one.chat.completions.create(stream=True, **request)
                parts.append([part async for part in stream])

    await run(context, agent)
    assert [[bool(part.choices) for part in answer].count(False) for answer in parts] == [0, 0, 1]
    assert [answer[-1].usage is not None for answer in parts] == [False, False, True]


UNKNOWN = CALL.replace("add", "sum")


@pytest.mark.parametrize("turn", [UNKNOWN, CALL.replace("1", "1,,"), f"<think>no</think>{UNKNOWN}"])
async def test_a_call_that_the_agent_cannot_run_is_answered_before_the_agent_sees_it(context, says, turn) -> None:
    says(turn, f"So.{CALL}", "82")
    replies = []

    async def agent(task, **access: str) -> list[float]:
        answer = await create(access, messages=[user("q")], tools=[ADD])
        message = answer.choices[0].message
        replies.append((message.content, [call.function.name for call in message.tool_calls], answer.usage))
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        replies.append((await ask(access, [user("q"), message, result], tools=[ADD])).content)
        return [0.5, 1.0]

    samples = await run(context, agent, turn_rewards="own")
    assert replies[0][:2] == ("So.", ["add"])
    assert replies[0][2].completion_tokens == len(turn) + len(f"So.{CALL}") + 2
    assert replies[1] == "82"
    assert [sample.reward for sample in samples] == [0.5, 0.5, 1.0]
    assert "[t:error: " in trained_with_rest(samples[-1])
    assert trained_with_rest(samples[-1]).endswith("[t:3]>82\x01")


async def test_an_unknown_call_beside_a_known_one_is_answered_with_the_agents_results(context, says) -> None:
    says(f"{UNKNOWN}\n{CALL}", "82")
    calls = []

    async def agent(task, **access: str) -> None:
        message = await ask(access, [user("q")], tools=[ADD])
        calls.extend(call.function.name for call in message.tool_calls)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await ask(access, [user("q"), message, result, user("now")], tools=[ADD])

    (sample,) = await run(context, agent)
    assert calls == ["add"]
    assert "'sum'; there are: add][t:3][u:now]>82\x01" in trained_with_rest(sample)


async def test_turns_with_invalid_calls_count_as_turns(context, says, engine: FakeEngine) -> None:
    says(UNKNOWN, UNKNOWN, UNKNOWN)

    async def agent(task, **access: str) -> None:
        await ask(access, [user("q")], tools=[ADD])

    await run(context, agent, max_turns=2)
    assert len(engine.sampled) == 2


async def test_a_call_inside_thoughts_does_not_reach_the_agent(context, says, engine: FakeEngine) -> None:
    says(f"<think>{CALL}</think>The answer is 4.")
    found = []

    async def agent(task, **access: str) -> None:
        found.append(await ask(access, [user("q")], tools=[ADD]))

    await run(context, agent)
    assert (found[0].tool_calls, found[0].content[-16:], len(engine.sampled)) == (None, "The answer is 4.", 1)


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


def trained_with_rest(sample: Sample) -> str:
    return "".join(map(chr, list(sample.tokens)[sample.prompt_length :]))


@pytest.mark.parametrize(
    ("turn_rewards", "expected"),
    [
        ("last", [("one\x01......two\x01", 0.25)]),
        ("own", [("one\x01", 1.0), ("..........two\x01", 0.25)]),
        ("following", [("one\x01", 1.25), ("..........two\x01", 0.25)]),
    ],
)
async def test_an_agent_may_give_each_answer_a_reward_of_its_own(context, says, turn_rewards, expected) -> None:
    says("one", "two")

    async def agent(task, **access: str) -> list[float]:
        first = await ask(access, [user("q")])
        await ask(access, [user("q"), first, user("a")])
        return [1, 0.25]

    samples = await run(context, agent, turn_rewards=turn_rewards)
    assert [(trained(one), one.reward) for one in samples] == expected
    assert {one.rollout_id for one in samples} == {3 if len(samples) > 1 else None}
    assert samples[0].metadata["agent"] == {"branches": 1}


async def test_answers_of_branches_have_their_rewards_in_the_order_of_the_requests(context, says) -> None:
    says("one", "two", "three")

    async def agent(task, **access: str) -> list[float]:
        first = await ask(access, [user("q")])
        await ask(access, [user("r")])
        await ask(access, [user("q"), first, user("a")])
        return [1, 2, 3]

    samples = await run(context, agent, turn_rewards="own")
    assert [(trained(one).strip("."), one.reward) for one in samples] == [
        ("one\x01", 1.0),
        ("three\x01", 3.0),
        ("two\x01", 2.0),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_connection_is_left_idle_for_the_pool_that_agents_share_to_look_at(context, says, stream) -> None:
    says("one")
    found = []

    async def agent(task, **access: str) -> None:
        async with client(access) as one:
            api = one.chat.completions.with_raw_response
            answer = await api.create(model="any", messages=[{"role": "user", "content": "q"}], stream=stream)
            found.append(answer.headers["connection"])

    await run(context, agent)
    assert found == ["close"]


async def test_a_stop_text_and_a_limit_of_the_request_hold(context, says, engine: FakeEngine) -> None:
    says("one;", "three")
    found = []

    async def agent(task, **access: str) -> None:
        found.append(await ask(access, [user("q")], stop=";"))
        answer = await create(access, messages=[user("r")], max_tokens=2)
        found.append(answer.choices[0].finish_reason)

    await run(context, agent)
    assert (found[0].content, found[1]) == ("one", "length")
    assert engine.bodies[0]["sampling_params"]["stop"] == ["END", ";"]


async def refused(access: Mapping[str, str], **request: Any) -> Any:
    given = {"model": "any", "messages": [user("q")]} | request
    with pytest.raises(openai.APIStatusError) as problem:
        await create(access, **given)
    return problem.value


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 100}, "n: "),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {}}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "type"),
    ],
)
async def test_a_request_that_is_not_offered_is_refused_and_the_rollout_goes_on(
    context, says, request_fields, message
) -> None:
    says("one")

    async def agent(task, **access: str) -> float:
        problem = await refused(access, **request_fields)
        assert problem.status_code == 400
        assert message in problem.message
        await ask(access, [user("q")])
        return 0.5

    (sample,) = await run(context, agent)
    assert (sample.reward, trained(sample)) == (0.5, "one\x01")


async def test_fields_that_change_nothing_are_accepted(context, says) -> None:
    says("one")
    neutral: dict[str, Any] = {
        "n": 1,
        "temperature": 0.2,
        "top_p": 0.9,
        "seed": 4,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "user": "me",
        "service_tier": "auto",
        "stop": None,
    }

    async def agent(task, **access: str) -> None:
        await create(access, messages=[user("q")], **neutral)

    (sample,) = await run(context, agent)
    assert (sample.status, trained(sample)) == (Status.COMPLETED, "one\x01")


async def test_the_refusal_of_an_only_request_is_named_by_the_sample(context) -> None:
    async def agent(task, **access: str) -> None:
        await refused(access, reasoning_effort="high")

    assert "reasoning_effort" in str((await fails(context, agent)).error)


async def test_another_key_reaches_nothing(context, says) -> None:
    says("one")
    keys = []

    async def agent(task, **access: str) -> None:
        for key in ("wrong", ""):
            problem = await refused({**access, "api_key": key or "x"})
            assert (problem.status_code, problem.code) == (401, "invalid_api_key")
        async with client(access) as one:
            models = await one.models.list()
        assert [one.id for one in models.data] == [access["model"]]
        await ask(access, [user("q")])
        keys.append(access)

    shared = function(agent)
    await asyncio.gather(*(shared(context, Sample(prompt="q", index=at), SAMPLING) for at in range(2)))
    assert len({one["api_key"] for one in keys}) == 2
    assert len({one["base_url"] for one in keys}) == 1


async def fails(context: GenerateContext, agent: Callable[..., Awaitable[object]], **options: Any) -> Sample:
    given = Sample(prompt="q", index=3, group_index=1)
    (sample,) = await asyncio.wait_for(run(context, agent, given, **options), 30)
    assert sample.status is Status.FAILED
    assert given == Sample(prompt="q", index=3, group_index=1)
    return sample


async def test_an_agent_that_raises_hangs_or_says_nothing_fails_its_sample(context, says) -> None:
    async def broken(task, **access: str) -> None:
        raise KeyError("gone")

    async def hangs(task, **access: str) -> None:
        await asyncio.sleep(60)

    async def silent(task, **access: str) -> None:
        pass

    async def counts_wrong(task, **access: str) -> list[float]:
        await ask(access, [user("q")])
        return [1.0, 2.0]

    async def undefined(task, **access: str) -> float:
        await ask(access, [user("q")])
        return float("nan")

    says("one", "one")
    assert "2 rewards for 1" in str((await fails(context, counts_wrong)).error)
    assert "finite number" in str((await fails(context, undefined)).error)
    sample = await fails(context, broken)
    assert (sample.failure_cause, sample.error) == (
        "agent_error",
        f"sample 3 of group 1: KeyError: 'gone' ({__file__}:{line_of(broken) + 1}, in broken)",
    )
    assert (await fails(context, hangs, agent_timeout_s=0.1)).failure_cause == "agent_timeout"
    assert "the agent made no" in str((await fails(context, silent)).error)


async def test_an_agent_that_uses_up_its_turns_or_the_context_is_trained_on_them(context, says) -> None:
    says(*["one"] * 3)

    async def endless(task, **access: str) -> None:
        messages: list[Any] = [user("q")]
        while True:
            messages += [await ask(access, messages), user("more " * 250)]

    (sample,) = await run(context, endless, max_turns=1)
    assert (trained(sample), sample.status) == ("one\x01", Status.COMPLETED)
    (sample,) = await run(context, endless)
    assert sample.status is Status.TRUNCATED


async def test_an_aborted_turn_ends_the_rollout_which_restarts_as_it_was(context, engine: FakeEngine) -> None:
    engine.aborts, engine.partial = True, 2

    async def agent(task, **access: str) -> None:
        while True:
            with pytest.raises(openai.BadRequestError, match="the rollout has ended"):
                await ask(access, [user("r")])

    given = Sample(prompt="q", index=3, group_index=1)
    with pytest.raises(Interrupted) as stop:
        await run(context, agent, given)
    assert (stop.value.sample.status, list(stop.value.sample.tokens)) == (Status.ABORTED, [])
    assert given.status is Status.PENDING


async def test_an_engine_that_is_gone_is_the_runs_affair_and_not_the_agents(context, engine: FakeEngine) -> None:
    engine.fail_with = [400]

    async def agent(task, **access: str) -> None:
        await ask(access, [user("q")])

    with pytest.raises(EngineError, match="failure set"):
        await run(context, agent)


async def test_an_agent_that_is_no_coroutine_runs_in_a_thread(context, says) -> None:
    says("82")

    def agent(task, base_url: str, api_key: str, model: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as one:
            answer = one.chat.completions.create(model=model, messages=[{"role": "user", "content": task.prompt}])
        return float(answer.choices[0].message.content == task.label)

    (sample,) = await run(context, agent)
    assert sample.reward == 1.0
