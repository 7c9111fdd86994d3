"""Concurrent turns, and turns that fail, of one call of a custom generate function."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_compat.conversation import Call, sampling_fields
from slime_core.errors import EngineError, PluginError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Sample, Status, TokenIds

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
FIRST = [{"role": "user", "content": "1+1"}]
END = 1


class Client:
    """Answers with the number of the request, once the concurrent ones have been sent; some requests fail."""

    url = "http://127.0.0.1:1"

    def __init__(self, *failing: int, error: BaseException | None = None) -> None:
        self.requests: list[list[int]] = []
        self.failing, self.error = failing, error or EngineError("gone")

    async def generate(self, ids: list[int], *, sampling: SamplingParams, session: str) -> list[Generation]:
        self.requests.append(list(ids))
        number = len(self.requests)
        await asyncio.sleep(0)
        if number in self.failing:
            raise self.error
        versions = ((str(number), 0, 1), (str(number + 1), 1, 2))
        return [Generation(TokenIds([5 + number, END]), LogProbs([-number, -number]), "stop", weight_spans=versions)]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=True)


def call(client: Any, encoder: PromptEncoder, budget: int = 99) -> Call:
    return Call(GenerateContext(client, encoder), SamplingParams(max_new_tokens=budget))


def second(answer: str) -> list[dict[str, Any]]:
    return [*FIRST, {"role": "assistant", "content": answer}, {"role": "user", "content": "2"}]


async def test_two_second_turns_at_once_are_two_conversations(encoder) -> None:
    client = Client()
    made = call(client, encoder)
    turns = second(await made.answer(FIRST, {}))
    await asyncio.gather(made.answer(turns, {}), made.answer(turns, {}))
    continued, new = made.trajectories
    assert [len(continued.answers), len(new.answers)] == [2, 1]
    assert (continued.ids[-2:], new.ids) == ([7, END], [8, END])
    # Each holds the ids that the engine saw for it, and no answer of the other.
    assert [*continued.prompt_ids, *continued.ids[:-2]] == client.requests[1]
    assert new.prompt_ids == client.requests[2] == encoder.encode(turns)
    assert continued.mask == [1, 1, *([0] * (len(continued.ids) - 4)), 1, 1]
    assert len(continued.log_probs) == len(continued.ids)


@pytest.mark.parametrize("error", [EngineError("gone"), asyncio.CancelledError()])
async def test_a_turn_that_failed_may_be_requested_again(encoder, error: BaseException) -> None:
    client = Client(2, error=error)
    made = call(client, encoder)
    turns = second(await made.answer(FIRST, {}))
    with pytest.raises(type(error)):
        await made.answer(turns, {})
    await made.answer(turns, {})
    (only,) = made.trajectories
    assert client.requests[1] == client.requests[2] == [*only.prompt_ids, *only.ids[:-2]]
    assert [str(one) for one in only.answers] == [encoder.decode([6, END]), encoder.decode([8, END])]


async def test_a_first_turn_that_failed_leaves_no_conversation(encoder) -> None:
    made = call(Client(1), encoder)
    with pytest.raises(EngineError):
        await made.answer(FIRST, {})
    await made.answer(FIRST, {})
    assert [len(one.answers) for one in made.trajectories] == [1]


async def test_added_tokens_count_in_the_budget(encoder) -> None:
    client = Client()
    made = call(client, encoder, budget=3)
    turns = second(await made.answer(FIRST, {}))
    assert (await made.answer(turns, {})).finish_reason == "length"
    assert len(client.requests) == 1


async def test_spans_say_which_weights_sampled_which_ids_of_the_response(encoder) -> None:
    made = call(Client(), encoder)
    await made.answer(second(await made.answer(FIRST, {})), {})
    (only,) = made.trajectories
    sample = Sample()
    only.fill(sample, encoder.tokenizer)
    end = len(only.ids)
    assert sample.weight_spans == [("1", 0, 1), ("2", 1, 2), ("2", end - 2, end - 1), ("3", end - 1, end)]
    trained = [place for _, start, stop in sample.weight_spans for place in range(start, stop)]
    assert trained == [place for place, trained in enumerate(only.mask) if trained]


TEMPLATE = (
    "{% if tools %}T{{ tools|length }}:{% endif %}{{ style }};{% for one in messages %}"
    "{{ one.role[0] }}{{ one.content }}{% if one.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% if tools %}{{ style }}{% endif %}{% endif %}"
)


async def test_every_turn_is_rendered_with_the_tools_and_arguments_of_the_run(monkeypatch) -> None:
    encoder = PromptEncoder(FOLDER, apply_chat_template=True, template_arguments={"style": "9"})
    monkeypatch.setattr(encoder.tokenizer, "chat_template", TEMPLATE)
    texts: list[str] = []
    encode = encoder.tokenizer.__class__.__call__
    monkeypatch.setattr(
        encoder.tokenizer.__class__,
        "__call__",
        lambda self, text, **how: texts.append(text) or encode(self, text, **how),
    )
    made = Call(GenerateContext(Client(), encoder), SamplingParams(max_new_tokens=99), tools=[{"name": "add"}])
    await made.answer(second(await made.answer(FIRST, {})), {})
    assert texts == ["T1:9;u1+1a9", "u2a9"]


class Ending(Client):
    """Its second answer was aborted; another version of the weights samples each."""

    async def generate(self, ids: list[int], *, sampling: SamplingParams, session: str) -> list[Generation]:
        (answer,) = await super().generate(ids, sampling=sampling, session=session)
        number = len(self.requests)
        reason, version = "abort" if number == 2 else "stop", str(number + 3)
        return [replace(answer, finish_reason=reason, weight_versions=(version,), weight_spans=((version, 0, 2),))]


async def test_a_conversation_of_which_a_turn_was_ended_is_not_finished_whatever_came_after(encoder) -> None:
    made = call(Ending(), encoder)
    turns = second(await made.answer(FIRST, {}))
    turns += [{"role": "assistant", "content": await made.answer(turns, {})}, {"role": "user", "content": "3"}]
    await made.answer(turns, {})
    (trajectory,) = made.trajectories
    sample = Sample()
    trajectory.fill(sample, encoder.tokenizer)
    assert sample.status is Status.ABORTED
    assert sample.weight_versions == ["4", "5", "6"]
    trained = [place for place, trains in enumerate(sample.loss_mask or ()) if trains]
    assert [(name, trained.index(start), end - start) for name, start, end in sample.weight_spans] == [
        ("4", 0, 2),
        ("5", 2, 2),
        ("6", 4, 2),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.5}, "temperature = 0.5"),
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"min_p": 0.1}, "min_p = 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1"),
    ],
)
async def test_a_turn_sampled_from_another_distribution_is_refused_in_training(encoder, given, message) -> None:
    client = Client()
    with pytest.raises(PluginError, match=rf"generate_single.*{message}"):
        await call(client, encoder).answer(FIRST, given)
    assert client.requests == []
    nothing: Any = client
    evaluating = Call(GenerateContext(nothing, encoder, evaluation=True), SamplingParams(max_new_tokens=99))
    await evaluating.answer(FIRST, given)
    same = {**sampling_fields(SamplingParams(max_new_tokens=99)), "repetition_penalty": 1.0, "min_p": 0.0}
    await call(client, encoder).answer(FIRST, {**same, "stop": ["x"]})
    assert len(client.requests) == 2
