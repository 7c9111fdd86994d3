"""The default generate function, and what every generate function is handed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slime_core.config.model_urls import model_url
from slime_core.errors import DataError, EngineError, RequestRefused, RunError
from slime_core.plugins.contracts import RunView
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.processing import InputProcessor, Processed
from slime_core.prompts.rows import tools_of
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.generation import Generation, SamplingParams
from slime_core.rollout.nucleus import keep
from slime_core.rollout.resuming import FINISHED, add, fail, left_to_draw, unfinished
from slime_core.rollout.stops import until_stop
from slime_core.rollout.together import together
from slime_core.types import LogProbs, PromptGroup, Sample, SpecInfo, Status, TokenIds

__all__ = ["GenerateContext", "SingleTurn"]


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """What a generate function works with.

    Arguments:
        client: sends token ids to the engines and returns token ids with log-probabilities.
        encoder: prompt to ids, ids to text.
        evaluation: whether the samples are only measured.
        rollout: number of the rollout; of an evaluation, the steps done.
        models: name -> URL of every model beside the policy.
        processor: makes what the model is trained on of a prompt's images; None: samples keep what they are given.
        masks_resumed: tokens of a response that was ended and goes on are not trained, those that are added are.
    """

    client: GenerateClient
    encoder: PromptEncoder
    evaluation: bool = False
    rollout: int = 0
    masks_resumed: bool = False
    models: Mapping[str, str] = field(default_factory=dict)
    processor: InputProcessor | None = None

    def model_url(self, name: str, endpoint: str = "") -> str:
        """Where model ``name`` answers: a judge, say, that a generate function asks.

        Raises:
            ConfigError: the run serves no such model.
        """
        return model_url(self.models, name, endpoint)


class SingleTurn:
    """One request a prompt group: all its samples continue the same prompt ids, once. A response that was ended goes on
    by a request of its own, from its tokens.

    Token ids and log-probabilities are kept exactly as the engine returned them; the text is decoded from the ids and
    never encoded again.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """The same samples, finished; those of a request that no engine answered are ``FAILED``, and no others.

        Raises:
            RequestRefused: an engine will never take such a request.
        """
        fresh, ended = unfinished(samples)
        begun = [_costing(fresh, partial(_begin, context, fresh, sampling))] if fresh else []
        going_on = [_costing([sample], partial(_go_on, context, sample, sampling)) for sample in ended]
        await together([*begun, *going_on])
        return samples


async def _costing(samples: Sequence[Sample], ask: Callable[[], Awaitable[None]]) -> None:
    """Wait for what fills ``samples``; a failure costs them."""
    try:
        await ask()
    except RequestRefused:
        raise
    except EngineError as failure:
        for sample in samples:
            fail(sample, failure)


async def _begin(context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> None:
    prompt_ids = context.encoder.encode(samples[0].prompt, tools=tools_of(samples[0].metadata))
    inputs = engine_inputs(samples[0])
    seen = await processed(context, samples[0])
    answers = await context.client.generate(prompt_ids, sampling=sampling, n=len(samples), **inputs)
    if len(answers) != len(samples):
        raise RunError(f"{len(samples)} responses were asked for, the engine returned {len(answers)}")
    for sample, answer in zip(samples, answers, strict=True):
        whole = until_stop((), answer, sampling, context.encoder)
        fill(sample, prompt_ids if seen is None else seen.ids, whole, context.encoder)
        if seen is not None:
            sample.multimodal_train_inputs = dict(seen.inputs)
            _refuse_another_prompt(sample, answer)


async def processed(context: GenerateContext, sample: Sample) -> Processed | None:
    """The sample's prompt with its images as the trained model reads it; None: it has none, or is not to be trained.

    Raises:
        DataError: the images cannot be read, or the processor refuses them.
    """
    inputs = sample.multimodal_inputs
    if context.processor is None or context.evaluation or not isinstance(inputs, dict) or not inputs:
        return None
    try:
        return await context.processor(sample.prompt, inputs, tools=tools_of(sample.metadata))
    except DataError as problem:
        raise DataError(f"sample {sample.index} of group {sample.group_index}: {problem}") from problem


def _refuse_another_prompt(sample: Sample, answer: Generation) -> None:
    found = answer.prompt_tokens
    if found is not None and found != sample.prompt_length:
        raise RunError(
            f"sample {sample.index}: the engine read {found} prompt tokens, and the checkpoint's processor makes "
            f"{sample.prompt_length} of the same prompt and images; log-probabilities would be of other places. Give "
            "every image one placeholder in the prompt, as the model's chat template writes it"
        )


def engine_inputs(sample: Sample) -> dict[str, Any]:
    """Arguments of a request that carry what the sample has beside text, as its file holds it; empty: nothing.

    Example: of ``multimodal_inputs = {"image": ["cat.png"]}``, ``{"extra": {"image_data": ["cat.png"]}}``, as SGLang
    names it.
    """
    inputs = sample.multimodal_inputs
    if not isinstance(inputs, dict) or not inputs:
        return {}
    return {"extra": {f"{kind}_data": value for kind, value in inputs.items()}}


async def _go_on(context: GenerateContext, sample: Sample, sampling: SamplingParams) -> None:
    rest = left_to_draw(sample, sampling)
    if rest is None:
        sample.status = Status.TRUNCATED
        return
    (answer,) = await context.client.generate(_so_far(context, sample), sampling=rest, **engine_inputs(sample))
    before = sample.tokens[sample.prompt_length :]
    answer = until_stop(before, answer, sampling, context.encoder)
    ids = [*before, *answer.token_ids]
    add(sample, answer, context.encoder.decode(ids), masks=context.masks_resumed)


def _so_far(context: GenerateContext, sample: Sample) -> list[int]:
    """The tokens of an ended response's request; the engine puts an image's further placeholders in by itself."""
    if context.processor is None or not sample.multimodal_train_inputs:
        return list(sample.tokens)
    asked = context.encoder.encode(sample.prompt, tools=tools_of(sample.metadata))
    return [*asked, *sample.tokens[sample.prompt_length :]]


def fill(sample: Sample, prompt_ids: list[int], answer: Generation, encoder: PromptEncoder) -> None:
    """Record one answer of the engine in ``sample``."""
    ids = list(answer.token_ids)
    sample.tokens = TokenIds([*prompt_ids, *ids])
    sample.response = encoder.decode(ids)
    sample.response_length = len(ids)
    sample.rollout_log_probs = LogProbs(answer.log_probs)
    sample.weight_versions = list(answer.weight_versions)
    sample.weight_spans = list(answer.weight_spans)
    sample.rollout_routed_experts = answer.routed_experts
    sample.spec_info = answer.spec_info or SpecInfo()
    keep(sample, answer.kept)
    sample.status = FINISHED[answer.finish_reason]


def fill_given(sample: Sample, prompt_ids: list[int], ids: list[int], encoder: PromptEncoder) -> None:
    """Record a response that no engine drew: log-probabilities are 0, and no version of the weights has made it."""
    sample.tokens = TokenIds([*prompt_ids, *ids])
    sample.response, sample.response_length = encoder.decode(ids), len(ids)
    sample.rollout_log_probs = LogProbs([0.0] * len(ids))
    sample.weight_versions, sample.weight_spans = [], []
