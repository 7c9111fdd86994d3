"""Conversations of one call of a custom generate function, stored as the ids that the engine read and sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, cast
from uuid import uuid4

from slime_compat.inside import Answer, Conversation
from slime_core.errors import PluginError
from slime_core.generation import GenerateContext, Generation, Kept, SamplingParams, joined, keep
from slime_core.generation.sampling import FINISHED, added
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Mask, Prompt, Sample, SpecInfo, Status, TokenIds

__all__ = ["Call", "Trajectory", "sampling_fields"]

MARK = "\u2063slime-answer\u2063"
"""Placeholder for the last answer while a chat template renders the messages after it; no prompt contains it."""


SGLANG_DEFAULTS = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Values that SGLang uses if a request does not give them."""

DISTRIBUTION = ("temperature", "top_p", "top_k", *SGLANG_DEFAULTS)
"""Sampling parameters that change the probabilities of tokens."""


@dataclass(slots=True)
class Trajectory:
    """One conversation so far.

    Arguments:
        prompt_ids: ids of the prompt of its first turn.
        messages: chat messages including the last answer; or the text including it.
        ids, log_probs, mask: of the response: answers (mask 1), and text between them (mask 0, log-prob 0).
        answers: the answers, in order.
        kept: truncated-sampling candidates of each part of the response, and its number of ids; None means all ids.
        spans: weight version of each range of response ids, as :attr:`Sample.weight_spans`.
        added: ids after the last answer, while the next turn is sampled; None if no turn is in flight.
        session: routing key that keeps its turns on one engine, if the router's policy uses it.
    """

    prompt_ids: list[int]
    messages: str | list[dict[str, Any]]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    kept: list[tuple[Kept | None, int]] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    added: list[int] | None = None
    session: str = field(default_factory=lambda: uuid4().hex)

    @property
    def seen(self) -> list[int]:
        """Return the ids that the next turn continues."""
        return [*self.prompt_ids, *self.ids, *(self.added or ())]

    def take(self, answer: Answer) -> None:
        """Append one turn of the model, after the ids that were added before it."""
        added = self.added or []
        offset = len(self.ids) + len(added)
        self.spans += [(name, offset + start, offset + end) for name, start, end in answer.weight_spans if end > start]
        self.ids += [*added, *answer.token_ids]
        self.log_probs += [*([0.0] * len(added)), *answer.log_probs]
        self.mask += [*([0] * len(added)), *([1] * len(answer.token_ids))]
        self.kept += [(None, len(added)), (answer.kept, len(answer.token_ids))]
        self.answers.append(answer)

    def is_in(self, text: str) -> bool:
        """Return whether ``text`` contains every answer, in order, or equals the last one."""
        if text.strip() == self.answers[-1].strip():
            return True
        place = 0
        for answer in self.answers:
            start = text.find(answer, place)
            if start < 0:
                return False
            place = start + len(answer)
        return True

    def _mask(self, sample: Sample) -> Mask:
        """Return the mask that the function set, which may remove answers or parts of them, else the own mask."""
        if sample.loss_mask is None:
            return Mask(self.mask)
        mask = list(map(int, sample.loss_mask))
        pairs = enumerate(zip(mask, self.mask, strict=False))
        trains = [place for place, (is_trained, is_sampled) in pairs if is_trained and not is_sampled]
        if len(mask) != len(self.mask) or trains:
            problem = f"trains token {trains[0]}, which no engine sampled" if trains else f"has {len(mask)} entries"
            raise PluginError(
                f"sample {sample.index}: the loss_mask that the function set {problem}; its conversation has "
                f"{len(self.mask)} response tokens, {sum(self.mask)} of them sampled by an engine. Accepted: one "
                "entry per token, 1 only for tokens that an engine sampled; or leave loss_mask unset."
            )
        return Mask(mask)

    def fill(self, sample: Sample, tokenizer: Any) -> None:
        """Record the conversation in ``sample``; a response and a loss mask of the sample are kept.

        Raises:
            PluginError: the loss mask has another length, or trains ids that no engine sampled.
        """
        sample.tokens = TokenIds([*self.prompt_ids, *self.ids])
        sample.response_length = len(self.ids)
        sample.loss_mask, sample.rollout_log_probs = self._mask(sample), LogProbs(self.log_probs)
        sample.response = sample.response or tokenizer.decode(self.ids, skip_special_tokens=True)
        versions = [version for answer in self.answers for version in answer.weight_versions]
        sample.weight_versions, sample.weight_spans = list(dict.fromkeys(versions)), list(self.spans)
        sample.rollout_routed_experts = self.answers[-1].routed_experts
        sample.spec_info = reduce(added, (answer.spec_info for answer in self.answers), None) or SpecInfo()
        keep(sample, joined(self.kept))
        was_aborted = any(answer.finish_reason == "abort" for answer in self.answers)
        sample.status = Status.ABORTED if was_aborted else FINISHED[self.answers[-1].finish_reason]


class Call:
    """State of one call of a custom generate function, used by ``generate_single``.

    Arguments:
        tools: descriptions of functions from the prompt's row, for the chat template.
        prompts: rendered prompt, which the function finds in ``sample.prompt`` -> the prompt that was rendered.
    """

    def __init__(
        self,
        context: GenerateContext,
        sampling: SamplingParams,
        *,
        tools: Sequence[Any] | None = None,
        prompts: Mapping[str, Prompt] | None = None,
    ) -> None:
        self._prompts = prompts or {}
        self._context = context
        self._sampling = sampling
        self._tools = tools
        self._encoder = cast(PromptEncoder, context.encoder)
        self.trajectories: list[Trajectory] = []

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder."""
        return self._encoder.tokenizer

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The run's sampling parameters, as a new dict."""
        return sampling_fields(self._sampling)

    async def answer(self, conversation: Conversation, sampling_params: Mapping[str, Any]) -> Answer:
        """Sample the next turn; all turns share the budget of response tokens.

        If two turns of one conversation are concurrent, the second starts a new trajectory. A turn that failed leaves
        the conversation unchanged.
        """
        messages = conversation if isinstance(conversation, str) else self._unrendered(conversation)
        trajectory = self._continued(messages) or self._new_trajectory(messages)
        try:
            answer = await self._sample_turn(trajectory, sampling_params)
            trajectory.take(answer)
        finally:
            trajectory.added = None
            if not trajectory.answers:
                self.trajectories = [other for other in self.trajectories if other is not trajectory]
        turn = {"role": "assistant", "content": str(answer)}
        trajectory.messages = messages + answer if isinstance(messages, str) else [*messages, turn]
        return answer

    async def respond(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Sample one turn as the response of ``sample``; if it has a response, resume from its ids."""
        trajectory = self._new_trajectory(cast("str | list[dict[str, Any]]", sample.prompt))
        max_new_tokens = (
            int(sampling_params.get("max_new_tokens", self._sampling.max_new_tokens)) - sample.response_length
        )
        if sample.response_length:
            trajectory.prompt_ids = list(sample.tokens)
        try:
            answer = await self._sample_turn(trajectory, {**sampling_params, "max_new_tokens": max_new_tokens})
        finally:
            self.trajectories = [other for other in self.trajectories if other is not trajectory]
        trajectory.take(answer)
        if not sample.response_length:
            trajectory.fill(sample, self.tokenizer)
            return sample
        spans = [{"version": name, "start": start, "end": end} for name, start, end in answer.weight_spans]
        meta: dict[str, Any] = {"finish_reason": answer.finish_reason, "weight_versions": spans}
        sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs, text=answer, meta_info=meta)
        return sample

    async def _sample_turn(self, trajectory: Trajectory, sampling_params: Mapping[str, Any]) -> Answer:
        if not self._context.evaluation:
            _refuse_another_distribution(sampling_params, self._sampling)
        limit = sampling_params.get("max_new_tokens", self._sampling.max_new_tokens)
        room = min(limit, self._sampling.max_new_tokens - len(trajectory.seen) + len(trajectory.prompt_ids))
        if room < 1:
            return _answer("", Generation(TokenIds(), LogProbs(), "length"))
        extra = {name: value for name, value in sampling_params.items() if name not in ("n", "max_new_tokens")}
        sampling = replace(self._sampling, max_new_tokens=room, extra={**self._sampling.extra, **extra})
        (generation,) = await self._context.client.generate(
            trajectory.seen, sampling=sampling, session=trajectory.session
        )
        return _answer(self._context.encoder.decode(list(generation.token_ids)), generation)

    def _new_trajectory(self, messages: str | list[dict[str, Any]]) -> Trajectory:
        encoder = self._context.encoder
        if isinstance(messages, str) and any(map(messages.startswith, self._prompts)):
            ids = encoder.encode_text(messages)
        else:
            ids = encoder.encode(messages, tools=self._tools)
        trajectory = Trajectory(ids, messages, added=[])
        self.trajectories.append(trajectory)
        return trajectory

    def _unrendered(self, conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace a message whose content is a rendered prompt, because the template renders it again: by the same
        message with the prompt, if that is text, or by the messages of the prompt."""
        messages: list[dict[str, Any]] = []
        for message in conversation:
            content = message.get("content")
            prompt = self._prompts.get(content) if isinstance(content, str) else None
            if prompt is None or isinstance(prompt, str):
                messages.append({**message, "content": content if prompt is None else prompt})
            else:
                messages += [dict(part) for part in prompt]
        return messages

    def _continued(self, messages: str | list[dict[str, Any]]) -> Trajectory | None:
        """Return the conversation that ``messages`` continues, unless another turn of it is in flight."""
        for trajectory in reversed(self.trajectories):
            added = self._added(trajectory, messages)
            if added is not None:
                trajectory.added = list(self.tokenizer(added, add_special_tokens=False)["input_ids"])
                return trajectory
        return None

    def _added(self, trajectory: Trajectory, messages: str | list[dict[str, Any]]) -> str | None:
        before = trajectory.messages
        if trajectory.added is not None or not trajectory.answers or not _starts_with(messages, before):
            return None
        if isinstance(messages, str):
            return messages[len(before) :]
        marked = [*messages[: len(before) - 1], {"role": "assistant", "content": MARK}, *messages[len(before) :]]
        text = self._encoder.render(marked, tools=self._tools, asks=True)
        return text.partition(MARK)[2].removeprefix(self._end_of(trajectory))

    def _end_of(self, trajectory: Trajectory) -> str:
        """Return the text of the token that ended the last answer, because the template also writes it."""
        last = trajectory.answers[-1].token_ids[-1:]
        return str(self.tokenizer.decode(last)) if last and trajectory.answers[-1].finish_reason == "stop" else ""


def _refuse_another_distribution(sampling_params: Mapping[str, Any], sampling: SamplingParams) -> None:
    of_run = {**SGLANG_DEFAULTS, **sampling.fields(n=1)}
    for name in (name for name in sampling_params if name in DISTRIBUTION and sampling_params[name] != of_run[name]):
        raise PluginError(
            f"generate_single: {name} = {sampling_params[name]!r}, but the run samples with {of_run[name]:g}. The "
            "learner computes log-probabilities with one distribution per run, so those of this turn would be wrong. "
            f"Leave {name} out, or set it for the run (--rollout-temperature, --rollout-top-p, --rollout-top-k); "
            "evaluations accept any value."
        )


def _starts_with(messages: str | list[dict[str, Any]], before: str | list[dict[str, Any]]) -> bool:
    """Compare messages without outer white space: functions strip answers, and the sampled ids are used anyway."""
    if isinstance(messages, str) or isinstance(before, str):
        return isinstance(messages, str) and isinstance(before, str) and messages.startswith(before)
    return len(messages) >= len(before) and [*map(_stripped, messages[: len(before)])] == [*map(_stripped, before)]


def _stripped(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.strip() if isinstance(value, str) else value for name, value in message.items()}


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return ``sampling`` as the dict that slime's functions send to an engine, for one response."""
    return {name: value for name, value in sampling.fields(n=1).items() if name != "n"}


def _answer(text: str, generation: Generation) -> Answer:
    answer = Answer(text)
    answer.token_ids, answer.log_probs = list(generation.token_ids), list(generation.log_probs)
    answer.finish_reason, answer.weight_versions = generation.finish_reason, generation.weight_versions
    answer.routed_experts, answer.spec_info = generation.routed_experts, generation.spec_info
    answer.kept, answer.weight_spans = generation.kept, generation.weight_spans
    return answer
