"""A generate function for prompt groups, written without ``Trajectory``; tests break it in one place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from slime_core.errors import EngineError, RequestRefused
from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class SingleTurn:
    """One request a prompt group; an aborted response resumes with a request of its own."""

    def __init__(self, options, run):
        pass

    async def __call__(self, context, samples, sampling):
        """The same samples, finished."""
        fresh, ended = unfinished(samples)
        new = [costing(fresh, partial(start, context, fresh, sampling))] if fresh else []
        going_on = [costing([sample], partial(go_on, context, sample, sampling)) for sample in ended]
        await together([*new, *going_on])
        return samples


def unfinished(samples):
    """The samples that have not started, and those that were aborted."""
    left = [sample for sample in samples if sample.status not in (Status.COMPLETED, Status.TRUNCATED)]
    return [one for one in left if not one.response_length], [one for one in left if one.response_length]


async def together(works):
    """Wait for all; where one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def costing(samples, ask):
    """Wait for what fills ``samples``; a failure costs them."""
    try:
        await ask()
    except RequestRefused:
        raise
    except EngineError as failure:
        for sample in samples:
            sample.status, sample.error = Status.FAILED, str(failure)


async def start(context, samples, sampling):
    """One request for all of ``samples``."""
    prompt_ids = context.encoder.encode(samples[0].prompt)
    answers = await context.client.generate(prompt_ids, sampling=sampling, n=len(samples))
    for sample, answer in zip(samples, answers, strict=True):
        fill(sample, prompt_ids, answer, context.encoder)


async def go_on(context, sample, sampling):
    """One request from the tokens of ``sample``."""
    have = sample.response_length
    rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - have)
    (answer,) = await context.client.generate(list(sample.tokens), sampling=rest)
    add(sample, answer, context.encoder, masks=context.masks_resumed)


def fill(sample, prompt_ids, answer, encoder):
    """Record a whole response."""
    ids = list(answer.token_ids)
    sample.tokens = TokenIds([*prompt_ids, *ids])
    sample.response = encoder.decode(ids)
    sample.response_length = len(ids)
    sample.rollout_log_probs = LogProbs(answer.log_probs)
    sample.weight_versions = list(answer.weight_versions)
    sample.status = FINISHED[answer.finish_reason]


def add(sample: Sample, answer, encoder, *, masks):
    """Record the rest of a response."""
    have, more = sample.response_length, list(answer.token_ids)
    before = [0] * have if masks else list(sample.loss_mask or [1] * have)
    sample.loss_mask = Mask([*before, *[1] * len(more)]) if masks or sample.loss_mask is not None else None
    sample.tokens = TokenIds([*sample.tokens, *more])
    sample.rollout_log_probs = LogProbs([*(sample.rollout_log_probs or ()), *answer.log_probs])
    sample.response_length = have + len(more)
    sample.response = encoder.decode(list(sample.tokens[-sample.response_length :]))
    sample.weight_versions = list(dict.fromkeys([*sample.weight_versions, *answer.weight_versions]))
    sample.status = FINISHED[answer.finish_reason]
