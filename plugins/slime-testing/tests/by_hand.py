"""A generate function for prompt groups, written without ``Trajectory``; tests break it in one place."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SingleTurn:
    """One request a prompt group; an aborted response resumes with a separate request."""

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        unfinished = [sample for sample in samples if sample.status not in (Status.COMPLETED, Status.TRUNCATED)]
        fresh = [sample for sample in unfinished if not sample.response_length]
        aborted = [sample for sample in unfinished if sample.response_length]
        resumed = [resume(context, sample, sampling) for sample in aborted]
        await asyncio.gather(*([start(context, fresh, sampling)] if fresh else []), *resumed)
        return samples


async def start(context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> None:
    prompt_ids = context.encoder.encode(samples[0].prompt)
    answers = await context.client.generate(prompt_ids, sampling=sampling, n=len(samples))
    for sample, answer in zip(samples, answers, strict=True):
        ids = list(answer.token_ids)
        sample.tokens = TokenIds([*prompt_ids, *ids])
        sample.response = context.encoder.decode(ids)
        sample.response_length = len(ids)
        sample.rollout_log_probs = LogProbs(answer.log_probs)
        sample.weight_versions = list(answer.weight_versions)
        sample.status = FINISHED[answer.finish_reason]


async def resume(context: GenerateContext, sample: Sample, sampling: SamplingParams) -> None:
    before = sample.response_length
    limited = replace(sampling, max_new_tokens=sampling.max_new_tokens - before)
    (answer,) = await context.client.generate(list(sample.tokens), sampling=limited)
    added = list(answer.token_ids)
    if context.masks_resumed or sample.loss_mask is not None:
        mask = [0] * before if context.masks_resumed else list(sample.loss_mask or ())
        sample.loss_mask = Mask([*mask, *[1] * len(added)])
    sample.tokens = TokenIds([*sample.tokens, *added])
    sample.rollout_log_probs = LogProbs([*(sample.rollout_log_probs or ()), *answer.log_probs])
    sample.response_length = before + len(added)
    sample.response = context.encoder.decode(list(sample.tokens[-sample.response_length :]))
    sample.weight_versions = list(dict.fromkeys([*sample.weight_versions, *answer.weight_versions]))
    sample.status = FINISHED[answer.finish_reason]
