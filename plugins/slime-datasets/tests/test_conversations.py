"""The generate function that trains the turns of the assistant."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError, RequestRefused
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.generation.sampling import engine_inputs
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Sample, Status, TokenIds
from slime_datasets.conversations import FromMessages
from slime_datasets.options import DatasetsOptions
from tests.chat_families import FAMILIES, encoder_of

TURNS = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "4"},
]


class Engine:
    """Answers 3 and records its requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def generate(self, input_ids: list[int], *, sampling: SamplingParams, n: int = 1, **more: Any) -> Any:
        self.requests.append((input_ids, more))
        return [Generation(array("i", [8, 1]), array("f", [-1, -1]), "stop")] * n


async def answer(
    prompt: Any, *, template: bool = True, longest: int = 99, evaluation: bool = False
) -> tuple[Sample, list[Any]]:
    engine: Any = Engine()
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=template)
    samples = [Sample(group_index=3, index=0, prompt=prompt)]
    context = GenerateContext(engine, encoder, evaluation=evaluation)
    (sample,) = await FromMessages(DatasetsOptions(), RunView())(
        context, samples, SamplingParams(max_new_tokens=longest)
    )
    return sample, engine.requests


async def test_the_response_starts_with_the_first_turn_and_masks_what_others_say():
    sample, requests = await answer(TURNS)
    assert sample.tokens == TokenIds([3, 6, 15, 6, 4, 7, 1, 3, 8, 4, 9, 1])
    assert (sample.response_length, sample.prompt_length, sample.status) == (7, 5, Status.COMPLETED)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1]
    assert (sample.rollout_log_probs, sample.response) == (LogProbs([0.0] * 7), "234")
    assert (sample.prompt, requests) == (TURNS, [])


async def test_a_long_conversation_is_cut():
    sample, _ = await answer(TURNS, longest=3)
    assert (sample.response_length, sample.loss_mask, sample.status) == (3, [1, 1, 0], Status.TRUNCATED)


async def test_an_evaluation_asks_for_the_last_turn():
    sample, requests = await answer(TURNS, evaluation=True)
    assert requests == [([3, 6, 15, 6, 4, 7, 1, 3, 8, 4], {})]
    assert (sample.response, sample.prompt) == ("3", TURNS)


@pytest.mark.parametrize(
    ("prompt", "given", "found"),
    [
        ("1+1", {}, "the prompt is text"),
        (TURNS, {"template": False}, "--apply-chat-template"),
        (TURNS[:1], {}, "no message of the assistant"),
    ],
)
async def test_a_malformed_conversation_is_refused(prompt, given, found):
    with pytest.raises(DataError) as caught:
        await answer(prompt, **given)
    assert str(caught.value).startswith("generate function 'from_messages': sample 0 of group 3: ")
    assert found in str(caught.value)


def test_images_go_to_the_engine_as_they_stand():
    assert engine_inputs(Sample(multimodal_inputs={"image": ["cat.png"]})) == {"extra": {"image_data": ["cat.png"]}}
    assert engine_inputs(Sample()) == {}


async def test_a_conversation_is_whole_again_where_its_evaluation_was_refused():
    class Refusing(Engine):
        async def generate(self, input_ids: list[int], **more: Any) -> Any:
            raise RequestRefused("too long")

    refusing: Any = Refusing()
    context = GenerateContext(refusing, PromptEncoder(ARITHMETIC / "model", apply_chat_template=True), evaluation=True)
    sample = Sample(group_index=3, index=0, prompt=list(TURNS))
    with pytest.raises(RequestRefused, match="too long"):
        await FromMessages(DatasetsOptions(), RunView())(context, [sample], SamplingParams())
    assert sample.prompt == TURNS


THOUGHTS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nfour"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "<think>\nadd again\n</think>\n\nsix"},
]


async def test_turns_that_the_template_writes_otherwise_later_are_siblings(tmp_path: Path):
    encoder = encoder_of(FAMILIES["qwen3"], tmp_path)
    nobody: Any = None
    samples = [Sample(group_index=3, index=number, prompt=THOUGHTS) for number in (6, 7)]
    function = FromMessages(DatasetsOptions(), RunView())
    made = await function(GenerateContext(nobody, encoder), samples, SamplingParams(max_new_tokens=99))
    assert [(sample.index, sample.rollout_id) for sample in made] == [(6, 6), (6, 6), (7, 7), (7, 7)]
    assert [sample.loss_mask == [1] * sample.response_length for sample in made] == [True] * 4
    texts = [encoder.decode_all(sample.tokens[sample.prompt_length :]) for sample in made]
    assert texts[:2] == ["<think>\nadd\n</think>\n\nfour<|im_end|>", "<think>\nadd again\n</think>\n\nsix<|im_end|>"]
    assert texts[2:] == texts[:2]
    assert encoder.decode_all(made[1].tokens[: made[1].prompt_length]) == encoder.render(THOUGHTS[:3], asks=True)


@pytest.mark.parametrize(
    ("family", "message", "named"),
    [
        (FAMILIES["qwen2.5"], {"reasoning_content": "hm", "content": "yes"}, "thoughts"),
        (replace(FAMILIES["qwen2.5"], stops=("<|endoftext|>",)), {"content": "yes"}, "eos_token_id"),
    ],
)
async def test_what_is_not_trained_is_said_once_and_names_the_message(tmp_path: Path, family, message, named):
    nobody: Any = None
    told: list[str] = []
    context = GenerateContext(nobody, encoder_of(family, tmp_path), warn=told.append)
    function = FromMessages(DatasetsOptions(), RunView())
    for index in range(3):
        prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", **message}]
        await function(context, [Sample(group_index=index, index=index, prompt=prompt)], SamplingParams())
    (text,) = told
    assert text.startswith("generate function 'from_messages': sample 0 of group 0: message 1 ")
    assert named in text
