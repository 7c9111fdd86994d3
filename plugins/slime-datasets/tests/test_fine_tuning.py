"""Conversations through the sampler of a run: rows in a file, shards out, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.sampler import SampledRollout, Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from tests.chat_families import FAMILIES, checkpoint

ADD, AGAIN = "<think>\nadd\n</think>\n\n4", "<think>\nadd again\n</think>\n\n6"
MANY = ["What is 2 + 2?", ADD, "3 + 3?", AGAIN]


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


async def sampled(folder: Path, *rows: Any) -> SampledRollout:
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
    registry = activate(["datasets"]).registry
    sampler = Sampler(SamplerSettings(config, folder, data, "http://unused"), registry)
    try:
        return await sampler.sample(0)
    finally:
        await sampler.close()


def trained(folder: Path, rollout: SampledRollout) -> list[str]:
    """The response of each sample of the shard, from its first trained token to its last."""
    (shard,) = rollout.shards
    encoder = PromptEncoder(folder, apply_chat_template=True)
    responses, start = [], 0
    for length, response in zip(shard.lengths_B.tolist(), shard.response_lengths_B.tolist(), strict=True):
        responses.append(encoder.decode_all(shard.tokens_T[start + length - response : start + length].tolist()))
        start += length
    return responses


@pytest.mark.parametrize(
    ("family", "contents", "wanted"),
    [
        (
            "r1-distill",
            ["What is 2 + 2?", "<think>\nTwo and two make four.\n</think>\n\nIt is 4."],
            ["Two and two make four.\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>"],
        ),
        ("qwen3-thinking-2507", ["2 + 2?", "4"], ["\n</think>\n\n4<|im_end|>"]),
        ("qwen3-thinking-2507", MANY, ["add\n</think>\n\n4<|im_end|>", "add again\n</think>\n\n6<|im_end|>"]),
        ("qwen3", MANY, [f"{ADD}<|im_end|>", f"{AGAIN}<|im_end|>"]),
        (
            "glm4.5",
            ["2 + 2?", "4", "3 + 3?", "6"],
            ["\n<think></think>\n4<|user|>\n3 + 3?<|assistant|>\n<think></think>\n6<|user|>"],
        ),
    ],
)
async def test_a_row_becomes_what_the_model_would_have_sampled(
    tmp_path: Path, family: str, contents: list[str], wanted: list[str]
) -> None:
    checkpoint(FAMILIES[family], tmp_path)
    rollout = await sampled(tmp_path, conversation(*contents))
    assert sorted(trained(tmp_path, rollout)) == sorted(wanted)
    assert rollout.warnings == []


async def test_the_sequences_of_a_row_weigh_as_much_as_one_sequence(tmp_path: Path) -> None:
    checkpoint(FAMILIES["qwen3"], tmp_path)
    rollout = await sampled(tmp_path, conversation(*MANY), conversation("5 + 5?", ADD))
    (shard,) = rollout.shards
    counts = shard.loss_weights_B * shard.response_lengths_B
    assert len(counts) == 3
    by_row = dict.fromkeys(shard.indices_B.tolist(), 0.0)
    for row, count in zip(shard.indices_B.tolist(), counts.tolist(), strict=True):
        by_row[row] += count
    assert list(by_row.values()) == pytest.approx([0.5, 0.5])


async def test_the_run_tells_once_of_thoughts_that_are_not_trained(tmp_path: Path) -> None:
    checkpoint(FAMILIES["qwen2.5"], tmp_path)
    row = [{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]
    rollout = await sampled(tmp_path, row, row)
    (text,) = rollout.warnings
    assert "message 1 holds thoughts" in text
