"""A response of two turns on the real engine: its ids, mask and log-probabilities against the engine's own scoring."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.services import engine_headers
from slime_core.types import Sample, Status

TURN = SamplingParams(max_new_tokens=6)
"""Log-probabilities at temperature 1 are those that the engine scores prompts with."""


LAST_ID = 15
"""The last id of the embedded model, ``+``."""


async def scored(url: str, ids: list[int]) -> list[float]:
    """The engine's log-probability of each id but the first, given those before it."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=body, headers=engine_headers(url)) as response,
    ):
        found = (await response.json())["meta_info"]["input_token_logprobs"]
    # SGLang writes 0 for the last id of the vocabulary, which it takes for the hash of an image (sglang 0.5.23,
    # srt/managers/scheduler_components/logprob_result_processor.py:54); the log-probability is that of the id.
    assert [entry[1] for entry in found] == [0 if one == LAST_ID else one for one in ids]
    return [entry[0] for entry in found[1:]]


async def calculate(context: GenerateContext, sample: Sample) -> Sample:
    """Writes a sum with the number of the first turn, which the second turn is to answer."""
    trajectory = context.start(sample)
    while trajectory.num_turns < 2 and not trajectory.is_full:
        turn = await trajectory.generate(TURN)
        if trajectory.num_turns < 2:
            trajectory.append_text(f"{turn.text}+1")
    return trajectory.finish()


async def test_ids_masks_and_log_probabilities_of_two_turns_are_those_that_the_engine_scores(engine: Any) -> None:
    encoder = PromptEncoder(engine.model, apply_chat_template=True)
    prompt_ids = encoder.encode("37+45")
    async with GenerateClient(engine.router.url, timeout_s=120, vocab_size=16) as client:
        context = GenerateContext(client, encoder, max_response_len=24, context_length=128)
        sample = await calculate(context, Sample(prompt="37+45", index=0, group_index=0))
    ids, mask = list(sample.tokens), list(sample.loss_mask or [1] * sample.response_length)
    assert ids[: sample.prompt_length] == prompt_ids
    assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
    # The model answers 82 in most tries; whatever it says, text between the turns is the only untrained part.
    first = mask.index(0)
    number = encoder.decode(ids[sample.prompt_length : sample.prompt_length + first])
    added = encoder.encode_text(f"{number}+1")
    assert mask == [1] * first + [0] * len(added) + [1] * (sample.response_length - first - len(added))
    assert ids[sample.prompt_length + first :][: len(added)] == added
    log_probs = list(sample.rollout_log_probs or ())
    assert log_probs[first : first + len(added)] == [0.0] * len(added)
    wanted = (await scored(engine.server.url, ids))[sample.prompt_length - 1 :]
    trained = [(found, right) for found, right, one in zip(log_probs, wanted, mask, strict=True) if one]
    assert len(trained) > first
    assert [found for found, _ in trained] == pytest.approx([right for _, right in trained], abs=1e-3)
    assert sample.weight_spans[0][1:] == (0, first)
    assert sample.weight_spans[-1][2] == sample.response_length
