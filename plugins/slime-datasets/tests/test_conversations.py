"""The generate function that trains the turns of the assistant, alone and in the sampler of a run."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import Sample, Status
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import DataError, RequestRefused
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import SampledRollout, TrainSampler
from slime_core.types import LogProbs, TokenIds
from slime_datasets.conversations import FromMessages
from tests.chat_families import FAMILIES, checkpoint, encoder_of


def turns_of(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


TURNS = turns_of("1+1", "2", "3", "4")
ADD, AGAIN = "<think>\nadd\n</think>\n\n4", "<think>\nadd again\n</think>\n\n6"
MANY = turns_of("What is 2 + 2?", ADD, "3 + 3?", AGAIN)


class Engine:
    """Answers 3 and records its requests, or refuses them."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.requests: list[Any] = []
        self._refuses = refuses

    async def generate(self, input_ids: list[int], *, sampling: SamplingParams, n: int = 1, **more: Any) -> Any:
        self.requests.append((input_ids, more))
        if self._refuses:
            raise RequestRefused("too long")
        return [Generation(array("i", [8, 1]), array("f", [-1, -1]), "stop")] * n


async def answer(
    sample: Sample, engine: Any = None, *, template: bool = True, longest: int = 99, evaluation: bool = False
) -> Sample:
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=template)
    context = GenerateContext(engine, encoder, evaluation=evaluation)
    (filled,) = await FromMessages()(context, [sample], SamplingParams(max_new_tokens=longest))
    return filled


def asked(prompt: Any) -> Sample:
    return Sample(group_index=3, index=0, prompt=prompt)


async def test_the_response_starts_with_the_first_turn_and_masks_the_turns_of_others() -> None:
    sample = await answer(asked(TURNS))
    assert sample.tokens == TokenIds([3, 6, 15, 6, 4, 7, 1, 3, 8, 4, 9, 1])
    assert (sample.response_length, sample.prompt_length, sample.status) == (7, 5, Status.COMPLETED)
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1]
    assert (sample.rollout_log_probs, sample.response, sample.prompt) == (LogProbs([0.0] * 7), "234", TURNS)


async def test_a_long_conversation_is_cut() -> None:
    sample = await answer(asked(TURNS), longest=3)
    assert (sample.response_length, sample.loss_mask, sample.status) == (3, [1, 1, 0], Status.TRUNCATED)


async def test_an_evaluation_asks_for_the_last_turn_and_leaves_the_conversation_as_it_was() -> None:
    engine, sample = Engine(), asked(list(TURNS))
    assert (await answer(sample, engine, evaluation=True)).response == "3"
    assert engine.requests == [([3, 6, 15, 6, 4, 7, 1, 3, 8, 4], {})]
    refused = asked(list(TURNS))
    with pytest.raises(RequestRefused, match="too long"):
        await answer(refused, Engine(refuses=True), evaluation=True)
    assert sample.prompt == refused.prompt == TURNS


@pytest.mark.parametrize(
    ("prompt", "template", "named"),
    [("1+1", True, "--input-key"), (TURNS, False, "--apply-chat-template"), (TURNS[:1], True, "no message")],
)
async def test_a_malformed_conversation_is_refused(prompt: Any, template: bool, named: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)'from_messages': sample 0 of group 3: .*{named}"):
        await answer(asked(prompt), template=template)


async def test_turns_that_the_template_writes_otherwise_later_are_siblings(tmp_path: Path) -> None:
    encoder = encoder_of(FAMILIES["qwen3"], tmp_path)
    nobody: Any = None
    samples = [Sample(group_index=3, index=number, prompt=MANY) for number in (6, 7)]
    made = await FromMessages()(GenerateContext(nobody, encoder), samples, SamplingParams(max_new_tokens=99))
    assert [(sample.index, sample.rollout_id) for sample in made] == [(6, 6), (6, 6), (7, 7), (7, 7)]
    assert [sample.loss_mask == [1] * sample.response_length for sample in made] == [True] * 4
    texts = [encoder.decode_all(sample.tokens[sample.prompt_length :]) for sample in made]
    assert texts == [f"{ADD}<|im_end|>", f"{AGAIN}<|im_end|>"] * 2
    assert encoder.decode_all(made[1].tokens[: made[1].prompt_length]) == encoder.render(MANY[:3], asks=True)


UNWRITTEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]


@pytest.mark.parametrize(
    ("family", "prompt", "named"),
    [
        (FAMILIES["qwen2.5"], UNWRITTEN, "thoughts"),
        (replace(FAMILIES["qwen2.5"], stops=("<|endoftext|>",)), turns_of("hi", "yes"), "eos_token_id"),
    ],
    ids=["thoughts", "end"],
)
async def test_untrained_parts_are_reported_once_with_the_message(tmp_path: Path, family, prompt, named) -> None:
    nobody: Any = None
    told: list[str] = []
    context = GenerateContext(nobody, encoder_of(family, tmp_path), warn=told.append)
    function = FromMessages()
    for index in range(3):
        await function(context, [Sample(group_index=index, index=index, prompt=prompt)], SamplingParams())
    (text,) = told
    assert "sample 0 of group 0: message 1 " in text
    assert named in text


# --- In the sampler of a run: rows in a file, shards out, without an engine -------------------------------------------


async def sampled(folder: Path, family: str, *rows: Any) -> SampledRollout:
    checkpoint(FAMILIES[family], folder)
    data = folder / "chat.jsonl"
    data.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    config = RunConfig(
        data=DataConfig(input_key="messages", label_key=None, apply_chat_template=True, rollout_shuffle=False),
        rollout=RolloutConfig(
            generate_function="from_messages", rm_type="zero", rollout_batch_size=len(rows), n_samples_per_prompt=1
        ),
        algorithm=AlgorithmConfig(advantage_estimator="sft"),
        eval=EvalConfig(eval_prompt_data=()),
    )
    sampler = TrainSampler(SamplerSettings(config, folder, data, "http://unused"), activate(["datasets"]).registry)
    try:
        return await sampler.sample(0)
    finally:
        await sampler.close()


@pytest.mark.parametrize(
    ("family", "row", "responses"),
    [
        (
            "r1-distill",
            turns_of("What is 2 + 2?", "<think>\nTwo and two make four.\n</think>\n\nIt is 4."),
            ["Two and two make four.\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>"],
        ),
        ("qwen3", MANY, [f"{ADD}<|im_end|>", f"{AGAIN}<|im_end|>"]),
        (
            "glm4.5",
            turns_of("2 + 2?", "4", "3 + 3?", "6"),
            ["\n<think></think>\n4<|user|>\n3 + 3?<|assistant|>\n<think></think>\n6<|user|>"],
        ),
    ],
)
async def test_a_row_becomes_what_the_model_would_have_sampled(tmp_path: Path, family, row, responses) -> None:
    rollout = await sampled(tmp_path, family, row)
    (shard,) = rollout.shards
    encoder = PromptEncoder(tmp_path, apply_chat_template=True)
    ends = shard.lengths_B.cumsum().tolist()
    spans = zip(ends, shard.response_lengths_B.tolist(), strict=True)
    texts = [encoder.decode_all(shard.tokens_T[end - length : end].tolist()) for end, length in spans]
    assert sorted(texts) == sorted(responses)
    assert rollout.warnings == []


async def test_the_sequences_of_a_row_weigh_as_much_as_one_sequence(tmp_path: Path) -> None:
    rollout = await sampled(tmp_path, "qwen3", MANY, turns_of("5 + 5?", ADD))
    (shard,) = rollout.shards
    by_row = dict.fromkeys(shard.indices_B.tolist(), 0.0)
    counts = (shard.loss_weights_B * shard.response_lengths_B).tolist()
    for row, count in zip(shard.indices_B.tolist(), counts, strict=True):
        by_row[row] += count
    assert (len(counts), list(by_row.values())) == (3, pytest.approx([0.5, 0.5]))
