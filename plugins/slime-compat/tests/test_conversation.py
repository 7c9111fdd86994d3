"""Concurrent turns, and turns that fail, of one call of a custom generate function."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_compat.conversation import Call, sampling_fields
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import EngineError, PluginError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Sample, Status, TokenIds

FIRST = [{"role": "user", "content": "1+1"}]
END = 1


class Client:
    """Answers with the number of the request, once the concurrent ones have been sent. The weights change within each
    answer. ``failing``: number of a request that raises; ``aborted``: of one whose answer is aborted."""

    url = "http://127.0.0.1:1"

    def __init__(self, *, failing: int = 0, aborted: int = 0, error: BaseException | None = None) -> None:
        self.requests: list[list[int]] = []
        self.failing, self.aborted, self.error = failing, aborted, error or EngineError("gone")

    async def generate(self, ids: list[int], *, sampling: SamplingParams, session: str) -> list[Generation]:
        self.requests.append(list(ids))
        number = len(self.requests)
        await asyncio.sleep(0)
        if number == self.failing:
            raise self.error
        spans = ((str(number), 0, 1), (str(number + 1), 1, 2))
        reason = "abort" if number == self.aborted else "stop"
        answer = Generation(TokenIds([5 + number, END]), LogProbs([-number, -number]), reason, weight_spans=spans)
        return [answer]


def call(client: Any, encoder: PromptEncoder, *, budget: int = 99, evaluation: bool = False, **more: Any) -> Call:
    context = GenerateContext(client, encoder, evaluation=evaluation)
    return Call(context, SamplingParams(max_new_tokens=budget), **more)


def next_turn(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "2"}]


async def test_two_second_turns_at_once_are_two_conversations(chat) -> None:
    client = Client()
    made = call(client, chat)
    turns = next_turn(FIRST, await made.answer(FIRST, {}))
    await asyncio.gather(made.answer(turns, {}), made.answer(turns, {}))
    continued, new = made.trajectories
    assert [len(continued.answers), len(new.answers)] == [2, 1]
    assert (continued.ids[-2:], new.ids) == ([7, END], [8, END])
    # Each holds the ids that the engine saw for it, and no answer of the other.
    assert [*continued.prompt_ids, *continued.ids[:-2]] == client.requests[1]
    assert new.prompt_ids == client.requests[2] == chat.encode(turns)
    assert continued.mask == [1, 1, *([0] * (len(continued.ids) - 4)), 1, 1]
    assert len(continued.log_probs) == len(continued.ids)


@pytest.mark.parametrize("error", [EngineError("gone"), asyncio.CancelledError()])
async def test_a_turn_that_failed_may_be_requested_again(chat, error: BaseException) -> None:
    client = Client(failing=2, error=error)
    made = call(client, chat)
    turns = next_turn(FIRST, await made.answer(FIRST, {}))
    with pytest.raises(type(error)):
        await made.answer(turns, {})
    await made.answer(turns, {})
    (only,) = made.trajectories
    assert client.requests[1] == client.requests[2] == [*only.prompt_ids, *only.ids[:-2]]
    assert [str(one) for one in only.answers] == [chat.decode([6, END]), chat.decode([8, END])]


async def test_a_first_turn_that_failed_leaves_no_conversation(chat) -> None:
    made = call(Client(failing=1), chat)
    with pytest.raises(EngineError):
        await made.answer(FIRST, {})
    await made.answer(FIRST, {})
    assert [len(one.answers) for one in made.trajectories] == [1]


async def test_added_tokens_count_in_the_budget(chat) -> None:
    client = Client()
    made = call(client, chat, budget=3)
    turns = next_turn(FIRST, await made.answer(FIRST, {}))
    assert (await made.answer(turns, {})).finish_reason == "length"
    assert len(client.requests) == 1


async def test_a_sample_has_the_weights_of_each_turn_and_is_unfinished_if_any_turn_was_aborted(chat) -> None:
    made = call(Client(aborted=2), chat)
    turns = FIRST
    for _ in range(3):
        turns = next_turn(turns, await made.answer(turns, {}))
    (trajectory,) = made.trajectories
    with pytest.raises(PluginError, match="2 entries"):
        trajectory.fill(Sample(loss_mask=[1, 0]), chat.tokenizer)
    sample = Sample()
    trajectory.fill(sample, chat.tokenizer)
    assert sample.status is Status.ABORTED
    trained = [place for place, trains in enumerate(sample.loss_mask or ()) if trains]
    spans = [(version, trained.index(start), end - start) for version, start, end in sample.weight_spans]
    assert spans == [("1", 0, 1), ("2", 1, 1), ("2", 2, 1), ("3", 3, 1), ("3", 4, 1), ("4", 5, 1)]


TEMPLATE = (
    "{% if tools %}T{{ tools|length }}:{% endif %}{{ style }};{% for one in messages %}"
    "{{ one.role[0] }}{{ one.content }}{% if one.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% if tools %}{{ style }}{% endif %}{% endif %}"
)


async def test_every_turn_is_rendered_with_the_tools_and_arguments_of_the_run(monkeypatch) -> None:
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=True, template_arguments={"style": "9"})
    monkeypatch.setattr(encoder.tokenizer, "chat_template", TEMPLATE)
    texts: list[str] = []
    kind = type(encoder.tokenizer)
    encode = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, text, **how: texts.append(text) or encode(self, text, **how))
    made = call(Client(), encoder, tools=[{"name": "add"}])
    await made.answer(next_turn(FIRST, await made.answer(FIRST, {})), {})
    assert texts == ["T1:9;u1+1a9", "u2a9"]


@pytest.mark.parametrize(
    "other", [{"temperature": 0.5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}], ids=str
)
async def test_a_turn_sampled_from_another_distribution_is_refused_in_training(chat, other: dict[str, float]) -> None:
    client = Client()
    with pytest.raises(PluginError, match=f"generate_single.*{next(iter(other))}"):
        await call(client, chat).answer(FIRST, other)
    assert client.requests == []
    await call(client, chat, evaluation=True).answer(FIRST, other)
    same = {**sampling_fields(SamplingParams(max_new_tokens=99)), "repetition_penalty": 1.0, "min_p": 0.0}
    await call(client, chat).answer(FIRST, {**same, "stop": ["x"]})
    assert len(client.requests) == 2
