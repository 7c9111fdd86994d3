"""The generate function ``from_messages``: the assistant's turns of each conversation, for supervised fine-tuning."""

from __future__ import annotations

from typing import cast

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.rows import tools_of
from slime_core.types import Mask, PromptGroup, Sample, Status
from slime_datasets.masks import ASSISTANT, Conversation, Family, conversation
from slime_datasets.options import DatasetsOptions

__all__ = ["FromMessages"]


class FromMessages:
    """Trains the assistant's turns of each prompt, which is a conversation; all samples of a group are equal.

    The response starts with the first assistant token and ends with the conversation; tokens of other roles in between
    have mask 0. No engine samples, so log-probabilities are 0. In an evaluation the engines sample the last turn, as
    ``single_turn`` does.
    """

    def __init__(self, options: DatasetsOptions, run: RunView) -> None:
        del run
        self._family: Family = options.loss_mask_type

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the same samples, finished; responses above ``max_new_tokens`` are cut and marked as truncated.

        Raises:
            DataError: a prompt is not a conversation, or the borders of its turns cannot be found.
        """
        if context.evaluation:
            return await self._sampled_turn(context, samples, sampling)
        found = _conversation(context, samples[0], self._family)
        for sample in samples:
            _fill(sample, found, context, sampling.max_new_tokens)
        return samples

    async def _sampled_turn(
        self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams
    ) -> list[Sample]:
        whole = samples[0].prompt
        if isinstance(whole, list) and len(whole) > 1 and whole[-1]["role"] == ASSISTANT:
            samples[0].prompt = whole[:-1]
        try:
            return await generate_group(context, samples, sampling)
        finally:
            samples[0].prompt = whole


def _conversation(context: GenerateContext, sample: Sample, family: Family) -> Conversation:
    who = f"generate function 'from_messages': sample {sample.index} of group {sample.group_index}"
    if isinstance(sample.prompt, str):
        raise DataError(
            f"{who}: the prompt is text; accepted: chat messages with the assistant's turns.\nName their field with "
            "--input-key."
        )
    if not context.encoder.uses_template:
        raise DataError(f"{who}: only a chat template turns messages into tokens; add --apply-chat-template")
    try:
        encoder = cast(PromptEncoder, context.encoder)
        return conversation(encoder, sample.prompt, family=family, tools=tools_of(sample.metadata))
    except DataError as problem:
        raise DataError(f"{who}: {problem}") from None


def _fill(sample: Sample, found: Conversation, context: GenerateContext, longest: int) -> None:
    start = found.prompt_length
    stop = min(len(found.token_ids), start + longest)
    trajectory = context.start(sample, prompt_ids=found.token_ids[:start])
    trajectory.append_ids(found.token_ids[start:stop], found.mask[start:stop])
    trajectory.finish()
    sample.status = Status.TRUNCATED if stop < len(found.token_ids) else Status.COMPLETED
    sample.loss_mask = Mask(found.mask[start:stop])
