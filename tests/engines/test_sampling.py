"""The distribution that the real engine samples from, the recorded log-probabilities, and how responses end.

Transformers' own warpers decide what is right: the temperature, then top-p, then top-k, which is the order that agrees
with SGLang's, whose top-p reads the mass before top-k cuts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_core.builtin.rollout import SingleTurn
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.responses import Truncation, read_generation
from slime_core.types import Sample, Status
from slime_core.weights.engine_control import call

PROMPT = [3, 8, 12, 15, 9, 10, 4]
"""``37+45`` in the chat template of the embedded model, which answers 82 and the token that ends a sequence."""

FREE = {"max_new_tokens": 12, "ignore_eos": True}

ROUNDING = 1e-4
"""A bound that a token passes or misses by less says nothing: it may fall on either side."""

Cut = Callable[[float], list[Any]]
"""Transformers' warpers, with their bound moved by so much."""


@torch.no_grad()
def warped(model: torch.nn.Module, answer: Generation, *warpers: Any) -> torch.Tensor:
    """Log-probabilities [t, 16] of the distributions from which transformers would sample the tokens of ``answer``."""
    ids = torch.tensor([*PROMPT, *answer.token_ids])
    logits_TV = model(ids[None]).logits[0, len(PROMPT) - 1 : -1].float()
    return LogitsProcessorList(warpers)(None, logits_TV).log_softmax(-1)


MASKED = {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 4}, "both": {"top_p": 0.9, "top_k": 4}, "min_p": {"min_p": 0.1}}


@pytest.mark.parametrize("given", MASKED.values(), ids=MASKED)
def test_the_mask_that_the_engine_reports_is_the_one_computed_from_the_likeliest_tokens(
    engine: Any, given: dict[str, Any]
) -> None:
    cut = Truncation.of(given, most=16, vocab_size=16)
    assert cut is not None
    body = {
        "input_ids": [PROMPT] * 8,
        "sampling_params": {**given, "top_k": cut.top_k, "temperature": 2.0, **FREE},
        "return_logprob": True,
        "return_sampling_mask": True,
        "top_logprobs_num": cut.top_k,
    }
    rows = call(engine.server.url, "/generate", body, timeout_s=120)
    sizes = set()
    for row in rows:
        computed, reported = (read_generation(row, None, replace(cut, is_reported=way)) for way in (False, True))
        assert computed.kept is not None
        assert reported.kept is not None
        assert len(computed.token_ids) == FREE["max_new_tokens"]
        assert reported.kept.offsets == computed.kept.offsets
        for start, end in pairwise(computed.kept.offsets):
            assert set(reported.kept.token_ids[start:end]) == set(computed.kept.token_ids[start:end])
            sizes.add(end - start)
        assert list(reported.log_probs) == pytest.approx(list(computed.log_probs), abs=1e-5)
    assert len(sizes) > 1 or "top_p" not in given


@pytest.mark.parametrize("ids", [PROMPT, PROMPT * 4], ids=["short", "long"])
async def test_every_sample_of_a_group_has_a_mask(engine: Any, ids: list[int]) -> None:
    url = engine.server.url
    for response_len in (FREE["max_new_tokens"], 2 * len(ids)):  # below the prompt's length, and above
        sampling = SamplingParams(top_p=0.8, max_new_tokens=response_len, ignore_eos=True)
        async with GenerateClient(url, engines=[url], masks_up_to=64, timeout_s=120, vocab_size=16) as client:
            answers = await client.generate(ids, sampling=sampling, n=3)
        for answer in answers:
            assert answer.kept is not None
            assert len(answer.kept.offsets) == response_len + 1


async def test_a_client_of_the_engine_itself_gets_masks_also_of_responses_that_are_aborted(engine: Any) -> None:
    long, url = SamplingParams(top_p=0.8, max_new_tokens=110, ignore_eos=True), engine.server.url
    async with GenerateClient(url, engines=[url], masks_up_to=64, timeout_s=120, vocab_size=16) as client:
        asking = [asyncio.create_task(client.generate(PROMPT, sampling=long)) for _ in range(50)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=0.5)
        async with client.aborting():
            answers = [answer for (answer,) in await asyncio.gather(*asking)]
        for answer in answers:
            assert answer.kept is not None or not answer.token_ids
            assert len(answer.token_ids) == len(answer.log_probs)
            assert answer.kept is None or len(answer.kept.offsets) == len(answer.token_ids) + 1


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize(
    ("given", "cut"),
    [
        ({}, lambda more: []),
        ({"top_k": 4}, lambda more: [TopKLogitsWarper(4)]),
        ({"top_p": 0.8}, lambda more: [TopPLogitsWarper(0.8 + more)]),
        ({"top_p": 0.9, "top_k": 4}, lambda more: [TopPLogitsWarper(0.9 + more), TopKLogitsWarper(4)]),
        ({"extra": {"min_p": 0.1}}, lambda more: [MinPLogitsWarper(0.1 + more)]),
        ({"top_p": 0.8, "max_kept": 3}, lambda more: [TopPLogitsWarper(0.8 + more), TopKLogitsWarper(3)]),
    ],
    ids=["all", "top_k", "top_p", "top_p and top_k", "min_p", "top_p of at most 3"],
)
async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from(
    client: GenerateClient, model: torch.nn.Module, given: dict[str, Any], cut: Cut, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, **FREE, **given)
    for answer in await client.generate(PROMPT, sampling=sampling, n=8):
        theirs_TV, wider_TV, narrower_TV = (
            warped(model, answer, TemperatureLogitsWarper(temperature), *cut(more)) for more in (0, ROUNDING, -ROUNDING)
        )
        clear_T = (wider_TV.isfinite() == narrower_TV.isfinite()).all(-1)
        assert clear_T.sum() > 6
        expected_T = theirs_TV.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert torch.tensor(answer.log_probs)[clear_T].tolist() == pytest.approx(expected_T[clear_T].tolist(), abs=1e-3)
        if not cut(0):
            assert answer.kept is None
            continue
        assert answer.kept is not None
        sets = torch.tensor(answer.kept.token_ids).split(torch.tensor(answer.kept.offsets).diff().tolist())
        # What is left to less than rounding may stay or go: sums of float32 pass the bound by as much.
        for ids, row_V, is_clear in zip(sets, theirs_TV, clear_T, strict=True):
            likely, possible = (set(one.nonzero()[:, 0].tolist()) for one in (row_V.exp() > 1e-6, row_V.isfinite()))
            assert not is_clear or likely <= set(ids.tolist()) <= possible


@pytest.mark.parametrize("given", [{"top_k": 1}, {"top_p": 1e-6}, {"extra": {"min_p": 1.0}}])
async def test_a_token_kept_alone_is_the_likeliest_and_has_log_prob_zero(
    client: GenerateClient, given: dict[str, Any]
) -> None:
    (greedy,) = await client.generate(PROMPT, sampling=SamplingParams(temperature=0, **FREE))
    for answer in await client.generate(PROMPT, sampling=SamplingParams(temperature=2.0, **FREE, **given), n=4):
        assert answer.token_ids == greedy.token_ids
        assert list(answer.log_probs) == pytest.approx([0.0] * 12, abs=1e-6)
        assert answer.kept is not None
        assert list(answer.kept.token_ids) == list(greedy.token_ids)


async def test_an_evaluation_does_not_request_the_truncated_sampling_mask(
    client: GenerateClient, model: torch.nn.Module
) -> None:
    sampling = SamplingParams(temperature=2.0, top_k=4, max_kept=None, **FREE)
    (answer,) = await client.generate(PROMPT, sampling=sampling)
    before_T = warped(model, answer, TemperatureLogitsWarper(2.0)).gather(1, torch.tensor(answer.token_ids)[:, None])
    assert answer.kept is None
    assert list(answer.log_probs) == pytest.approx(before_T[:, 0].tolist(), abs=1e-3)


async def test_tokens_that_are_forbidden_are_left_out(client: GenerateClient, model: torch.nn.Module) -> None:
    """The end of the sequence, before the fourth token."""
    end = 1
    sampling = SamplingParams(temperature=2.0, max_new_tokens=12, min_new_tokens=4, stop_token_ids=(end,))
    for answer in await client.generate(PROMPT, sampling=sampling, n=8):
        theirs_TV = warped(model, answer, TemperatureLogitsWarper(2.0))
        theirs_TV[:4, end] = -torch.inf
        sampled_T = torch.tensor(answer.token_ids)[:, None]
        assert len(answer.token_ids) >= 4
        assert end not in answer.token_ids[:3]
        assert list(answer.log_probs) == pytest.approx(
            theirs_TV.log_softmax(-1).gather(1, sampled_T)[:, 0].tolist(), abs=1e-3
        )


# --- How responses end ------------------------------------------------------------------------------------------------


@pytest.fixture
async def single(engine: Any, client: GenerateClient) -> Any:
    """One sample of the default generate function."""
    encoder = PromptEncoder(engine.model, apply_chat_template=True)

    async def made(**given: Any) -> Sample:
        sampling = SamplingParams(temperature=0, **given)
        (sample,) = await SingleTurn()(GenerateContext(client, encoder), [Sample(prompt="37+45")], sampling)
        assert len(sample.tokens) == sample.prompt_length + sample.response_length
        assert sample.rollout_log_probs is not None
        assert len(sample.rollout_log_probs) == sample.response_length
        return sample

    return made


async def test_a_stop_text_is_kept_with_its_ids_and_log_probs(single: Any) -> None:
    free = await single(**FREE)
    for length in (1, 2):
        text = free.response[:length]
        stopped = await single(max_new_tokens=12, stop=(text,))
        assert (stopped.response, stopped.status, stopped.response_length) == (text, Status.COMPLETED, length)
        assert stopped.tokens == free.tokens[: free.prompt_length + length]
        assert list(stopped.rollout_log_probs) == pytest.approx(list(free.rollout_log_probs)[:length], abs=1e-3)


async def test_a_response_ends_with_a_stop_id_at_its_limit_or_by_itself(single: Any) -> None:
    free, whole = await single(**FREE), await single(max_new_tokens=12)
    second = free.tokens[free.prompt_length + 1]
    stopped = await single(max_new_tokens=12, stop_token_ids=(second,), ignore_eos=False)
    assert (stopped.tokens[-1], stopped.status, stopped.response_length) == (second, Status.COMPLETED, 2)
    exact = await single(max_new_tokens=whole.response_length)
    assert (exact.tokens, exact.status) == (whole.tokens, Status.COMPLETED)
    for limit in ({"max_new_tokens": 1}, {"max_new_tokens": 12, "extra": {"max_new_tokens": 1}}):
        cut = await single(**limit)
        assert (cut.status, cut.response_length) == (Status.TRUNCATED, 1)


# --- A response of two turns ------------------------------------------------------------------------------------------

TURN = SamplingParams(max_new_tokens=6)
"""Log-probabilities at temperature 1 are those that the engine scores prompts with."""


LAST_ID = 15
"""The last id of the embedded model, ``+``."""


async def scored(url: str, ids: list[int]) -> list[float]:
    """The engine's log-probability of each id but the first, given those before it."""
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = await asyncio.to_thread(call, url, "/generate", body, timeout_s=120)
    entries = answer["meta_info"]["input_token_logprobs"]
    # SGLang writes 0 for the last id of the vocabulary, which it takes for the hash of an image (sglang 0.5.23,
    # srt/managers/scheduler_components/logprob_result_processor.py:54); the log-probability is that of the id.
    assert [entry[1] for entry in entries] == [0 if id_ == LAST_ID else id_ for id_ in ids]
    return [entry[0] for entry in entries[1:]]


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
    expected = (await scored(engine.server.url, ids))[sample.prompt_length - 1 :]
    assert sum(mask) > first
    for recorded, right, is_trained in zip(log_probs, expected, mask, strict=True):
        assert recorded == pytest.approx(right, abs=1e-3) or not is_trained
    assert sample.weight_spans[0][1:] == (0, first)
    assert sample.weight_spans[-1][2] == sample.response_length
