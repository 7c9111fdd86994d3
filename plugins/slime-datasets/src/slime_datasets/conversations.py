"""The generate function ``from_messages``: the assistant's turns of each conversation, for supervised fine-tuning."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import cast

from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import Mask, PromptGroup, Sample, Status, tools_of
from slime_datasets.masks import ASSISTANT, Conversation, conversations

__all__ = ["FromMessages"]


class FromMessages:
    """Trains the assistant's turns of conversations: supervised fine-tuning.

    Each prompt is a conversation, and all samples of a group are equal. The response starts with the first assistant
    token and ends with the last; tokens of other roles in between have mask 0. If the chat template leaves thoughts out
    of earlier turns, a sample has a sibling for each further sequence (:mod:`slime_datasets.masks`). No engine samples,
    so log-probabilities are 0. In an evaluation the engines sample the last turn, as ``single_turn`` does.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the samples and their siblings, finished; responses above ``max_new_tokens`` are cut and marked as
        truncated.

        Raises:
            DataError: a prompt is not a conversation, or its turns cannot be found.
        """
        if context.evaluation:
            return await self._sampled_turn(context, samples, sampling)
        conversations = _conversations(context, samples[0])
        self._warn(context, samples[0], conversations)
        return [
            _filled(sibling, conversation, context, sampling.max_new_tokens)
            for sample in samples
            for sibling, conversation in zip(_siblings(sample, len(conversations)), conversations, strict=True)
        ]

    def _warn(self, context: GenerateContext, sample: Sample, conversations: list[Conversation]) -> None:
        """Warn of thoughts that are not trained, and of turns that nothing ends; each once in a run."""
        for turn in [turn for conversation in conversations for turn in conversation.turns]:
            where = f"{_who(sample)}: message {turn.place}"
            if turn.lacks_thoughts:
                self._warn_once(
                    context,
                    "thoughts",
                    f"{where} holds thoughts that are not trained, because the chat template leaves them out; others "
                    "may as well. Write thoughts as the template reads them, or take a template that writes them",
                )
            if not turn.stops:
                self._warn_once(
                    context,
                    "end",
                    f"{where} is trained without a token at which engines stop (end_ids: tokenizer, config.json, "
                    f"generation_config.json); the chat template ends the turn with {turn.end!r}. Name that token in "
                    "eos_token_id of generation_config.json, or correct the template",
                )

    def _warn_once(self, context: GenerateContext, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            context.warn(text)

    async def _sampled_turn(
        self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams
    ) -> list[Sample]:
        messages = samples[0].prompt
        if isinstance(messages, list) and len(messages) > 1 and messages[-1]["role"] == ASSISTANT:
            samples[0].prompt = messages[:-1]
        try:
            return await generate_group(context, samples, sampling)
        finally:
            samples[0].prompt = messages


def _who(sample: Sample) -> str:
    return f"generate function 'from_messages': sample {sample.index} of group {sample.group_index}"


def _conversations(context: GenerateContext, sample: Sample) -> list[Conversation]:
    if isinstance(sample.prompt, str):
        raise DataError(
            f"{_who(sample)}: the prompt is text; accepted: chat messages with the assistant's turns.\nName their "
            "field with --input-key."
        )
    if not context.encoder.uses_template:
        raise DataError(f"{_who(sample)}: only a chat template turns messages into tokens; add --apply-chat-template")
    try:
        return conversations(cast(PromptEncoder, context.encoder), sample.prompt, tools=tools_of(sample.metadata))
    except DataError as problem:
        raise DataError(f"{_who(sample)}: {problem}") from None


def _siblings(sample: Sample, number: int) -> list[Sample]:
    """``sample`` and as many copies as make ``number``; they count as one response."""
    if number > 1 and sample.rollout_id is None:
        sample.rollout_id = sample.index or 0
    return [sample, *(replace(sample, metadata=deepcopy(sample.metadata)) for _ in range(number - 1))]


def _filled(sample: Sample, conversation: Conversation, context: GenerateContext, longest: int) -> Sample:
    start = conversation.prompt_length
    stop = min(len(conversation.token_ids), start + longest)
    trajectory = context.start(sample, prompt_ids=conversation.token_ids[:start])
    trajectory.append_ids(conversation.token_ids[start:stop], conversation.mask[start:stop])
    trajectory.finish()
    sample.status = Status.TRUNCATED if stop < len(conversation.token_ids) else Status.COMPLETED
    sample.loss_mask = Mask(conversation.mask[start:stop])
    return sample
