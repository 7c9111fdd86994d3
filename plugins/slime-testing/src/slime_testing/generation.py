"""The suite of generate functions: samples are trained on the ids that the engine sampled, and are consistent.

The engine is the fake engine, over HTTP and through a run's client. The encoder is real, with a tokenizer for which
encoding a response's text gives other ids than those that were sampled.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_core.generation import Client, GenerateContext, Interrupted, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import PromptGroup, Sample, Status
from slime_testing.fake_engine import LOG_PROB, FakeEngine
from slime_testing.harness import Kind
from slime_testing.harness.engines import connect
from slime_testing.pairs import END, NUM_SAMPLED_IDS, letters, pairing_encoder, start_id
from slime_testing.resumed import ended, require_left_alone, require_resumed
from slime_testing.suite import ComponentSuite, require
from slime_testing.waiting import require_cancellable, run

__all__ = ["SAMPLING", "GenerateFunctionSuite", "make_context", "make_engine", "require_log_probs", "require_sampled"]

PROMPTS = ("6 * 7 = ", "What is the capital of France?", "once upon a time", "Say 1234.")
VERSION, LATER = "7", "8"
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(END,))
CONTEXT_LENGTH = 8192
NEVER_S = 3600.0
PARTIAL = 2
"""Number of tokens of an aborted response."""


@dataclass(frozen=True, slots=True)
class _GroupResult:
    """One group: its samples, the samples that each call returned, and all that the engine sampled, for all groups."""

    parents: PromptGroup
    calls: list[list[Sample]]
    sampled: list[tuple[list[int], list[int]]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for call in self.calls for sample in call]


class GenerateFunctionSuite(ComponentSuite):
    """For generate functions.

    Attributes:
        prompts: the prompts, one group each.
        answers: texts that the engine answers with, in order, for each prompt; for functions that react to the text of
            a response. Empty: any tokens.
        group_size: number of samples of a prompt.
        apply_chat_template: True: prompts are rendered as chat.
        label, metadata: label and metadata of every sample.
    """

    kind: ClassVar[Kind] = Kind.GENERATE_FUNCTION
    prompts: ClassVar[Sequence[Any]] = PROMPTS
    answers: ClassVar[Sequence[str]] = ()
    group_size: ClassVar[int] = 2
    apply_chat_template: ClassVar[bool] = False
    label: ClassVar[str] = "42"
    metadata: ClassVar[dict[str, Any]] = {}

    def test_every_sample_is_finished(self) -> None:
        for result in self._results():
            require(bool(result.samples), "a generation returned no sample; return it as FAILED or ABORTED instead")
            for sample in result.samples:
                require(sample.status is not Status.PENDING, f"{_who(sample)} is still pending; set its status")
                lengths = f"{sample.response_length} response tokens of {len(sample.tokens)}"
                has_both = 0 < sample.response_length < len(sample.tokens)
                require(
                    has_both, f"{_who(sample)} has {lengths}; tokens are the prompt's ids and the response's after them"
                )

    def test_token_ids_are_those_that_the_engine_sampled(self) -> None:
        for result in self._results():
            if not self.traits().samples_from_engine:
                require(not result.sampled, "it is added with samples_from_engine=False, and the engine got a request")
                continue
            for sample in result.samples:
                require_sampled(sample, result.sampled)

    def test_log_probs_are_those_of_the_engine(self) -> None:
        for result in self._results():
            for sample in result.samples:
                require_log_probs(sample, sampled=self.traits().samples_from_engine)

    def test_the_loss_mask_has_one_entry_a_response_token(self) -> None:
        for result in self._results():
            for sample in result.samples:
                mask = _mask(sample)
                require(
                    len(mask) == sample.response_length and set(mask) <= {0, 1},
                    f"{_who(sample)} has {sample.response_length} response tokens and a loss mask of {len(mask)} "
                    "entries; one 0 or 1 per response token is wanted, or None if all are trained",
                )

    def test_tool_text_is_not_a_new_conversation_of_the_chat_template(self) -> None:
        for result in self._results(apply_chat_template=True):
            for sample in result.samples:
                start = len(sample.tokens) - sample.response_length
                pairs = enumerate(zip(list(sample.tokens)[start:], _mask(sample), strict=False))
                restarts = [at for at, (token, trained) in pairs if token == start_id() and not trained]
                require(
                    not restarts,
                    f"{_who(sample)} starts a new conversation at the positions {restarts} of its response: a tool's "
                    "text went through the chat template as if it were a prompt (context.encoder.encode, or the "
                    "tokenizer's apply_chat_template). Add it unchanged with trajectory.append_text or "
                    "encoder.encode_text, or as a message that continues the conversation with "
                    "trajectory.append_message",
                )

    def test_weight_versions_are_recorded(self) -> None:
        expected = [VERSION] if self.traits().samples_from_engine else []
        for result in self._results():
            for sample in result.samples:
                versions = list(sample.weight_versions)
                require(
                    versions == expected,
                    f"{_who(sample)} was sampled from weights of the versions {expected}, but its weight_versions are "
                    f"{versions}: copy them from the engine's answers, oldest first, each once",
                )

    def test_siblings_share_a_rollout_id(self) -> None:
        used: set[int] = set()
        for result in self._results():
            for call in result.calls:
                generations = len(result.parents) if self._takes_groups() else 1
                ids = {sample.rollout_id for sample in call if sample.rollout_id is not None}
                distinct = len(ids) + sum(sample.rollout_id is None for sample in call)
                rollout_ids = [sample.rollout_id for sample in call]
                require(
                    distinct <= generations,
                    f"{generations} generation(s) made {len(call)} samples with the rollout ids {rollout_ids}: "
                    "siblings of one generation share one rollout_id, or each would weigh as much as a whole rollout",
                )
                require(not ids & used, f"the rollout ids {sorted(ids & used)} belong to another generation already")
                used |= ids

    def test_label_metadata_and_group_stay(self) -> None:
        for result in self._results():
            groups = {parent.group_index for parent in result.parents}
            for sample in result.samples:
                require(
                    sample.label == self.label, f"{_who(sample)} has the label {sample.label!r}, not {self.label!r}"
                )
                lost = [key for key in self.metadata if key not in sample.metadata]
                require(not lost, f"{_who(sample)} has lost {lost} of its metadata")
                require(sample.group_index in (*groups, None), f"{_who(sample)} left its group, which was {groups}")

    def test_samples_of_an_evaluation_are_finished_too(self) -> None:
        for result in self._results(evaluation=True):
            for sample in result.samples:
                require(sample.status is not Status.PENDING, f"{_who(sample)} of an evaluation is still pending")

    def test_what_the_engine_ended_is_not_called_finished(self) -> None:
        if not self.traits().samples_from_engine:
            return
        for result in self._results(aborts=True):
            for sample in result.samples:
                require(
                    sample.status in (Status.ABORTED, Status.FAILED),
                    f"{_who(sample)} was ended by the engine before its time and is {sample.status}: it would be "
                    "trained as if it were whole. Where finish_reason is abort, return it as ABORTED, and it comes "
                    "again",
                )

    def test_prompts_generated_at_once_are_not_mixed_up(self) -> None:
        if self.answers:  # the engine returns them in order, so concurrent prompts would get each other's
            return
        together = self._results()
        for number, result in enumerate(together):
            (alone,) = self._results(only=number)
            actual, expected = ([list(sample.tokens) for sample in entry.samples] for entry in (result, alone))
            require(
                actual == expected,
                f"generated among others, prompt {number} has the tokens {actual}, alone {expected}: state is shared "
                "between generations",
            )

    def test_an_aborted_turn_resumes_from_its_tokens(self) -> None:
        if not self.traits().resumes:
            return
        for result in self._results():
            if result.samples[0].response_length > 1:
                self._require_resumes(result.samples)

    def _require_resumes(self, samples: list[Sample]) -> None:
        """Abort the first sample half way, and generate its group again with newer weights."""
        encoder = pairing_encoder(apply_chat_template=self.apply_chat_template)
        complete = samples[0]
        first_half = list(complete.tokens)[
            complete.prompt_length : complete.prompt_length + complete.response_length // 2
        ]
        before = ended(complete, text=encoder.decode(first_half))
        finished = samples[1:] if self._takes_groups() else []
        with make_engine(version=LATER) as engine:
            engine.answers = [letters(text) for text in self.answers]
            (calls,) = run(self._generated(engine, [copy.deepcopy([before, *finished])], encoder))
            sampled = list(engine.sampled)
        returned = [sample for call in calls for sample in call]
        most = SAMPLING.max_new_tokens if self.traits().sends_prompts_whole else None
        require_resumed(before, returned, sampled, versions=(VERSION, LATER), most=most)
        require_left_alone(finished, returned)

    def test_it_can_be_cancelled(self) -> None:
        encoder = pairing_encoder(apply_chat_template=self.apply_chat_template)  # first, because loading it is slow
        with make_engine() as engine:
            engine.delay_s = NEVER_S
            require_cancellable(lambda: self._generated_alone(engine, encoder), "the generate function")

    def _results(
        self,
        *,
        evaluation: bool = False,
        only: int | None = None,
        aborts: bool = False,
        apply_chat_template: bool | None = None,
    ) -> list[_GroupResult]:
        """Generate all prompts, concurrently unless the engine's answers are given."""
        is_chat = self.apply_chat_template if apply_chat_template is None else apply_chat_template
        numbers = list(range(len(self.prompts))) if only is None else [only]
        with make_engine() as engine:
            engine.aborts, engine.partial = aborts, PARTIAL
            if not self.answers:
                groups = [self._group(number) for number in numbers]
                return self._group_results(engine, groups, evaluation, is_chat)
            results = []
            for number in numbers:
                engine.answers = [letters(text) for _ in range(self.group_size) for text in self.answers]
                results += self._group_results(engine, [self._group(number)], evaluation, is_chat)
            return results

    def _group_results(
        self, engine: FakeEngine, groups: list[PromptGroup], evaluation: bool, is_chat: bool
    ) -> list[_GroupResult]:
        parents = copy.deepcopy(groups)
        encoder = pairing_encoder(apply_chat_template=is_chat)
        calls = run(self._generated(engine, groups, encoder, evaluation=evaluation))
        return [_GroupResult(*each, list(engine.sampled)) for each in zip(parents, calls, strict=True)]

    async def _generated(
        self, engine: FakeEngine, groups: list[PromptGroup], encoder: PromptEncoder, *, evaluation: bool = False
    ) -> list[list[list[Sample]]]:
        """Return, for each group, the samples of each call, called as the core does."""
        generate = self.make()
        async with connect(engine.url, vocab_size=encoder.vocab_size) as client:
            context = make_context(client, encoder, evaluation=evaluation)

            async def called(unit: Any) -> list[Sample]:
                try:
                    samples = await generate(context, unit, SAMPLING)
                except Interrupted as interrupted:
                    samples = unit if self._takes_groups() else interrupted.sample
                return list(samples) if isinstance(samples, list) else [samples]

            async def grouped(group: PromptGroup) -> list[list[Sample]]:
                if self._takes_groups():
                    return [await called(group)]
                if not self.answers:
                    return list(await asyncio.gather(*map(called, group)))
                return [await called(sample) for sample in group]

            return list(await asyncio.gather(*map(grouped, groups)))

    async def _generated_alone(self, engine: FakeEngine, encoder: PromptEncoder) -> Any:
        """Call the generate function once, without a task around it that would be cancelled in its place."""
        group = self._group(0)
        async with connect(engine.url, vocab_size=encoder.vocab_size) as client:
            context = make_context(client, encoder)
            return await self.make()(context, group if self._takes_groups() else group[0], SAMPLING)

    def _takes_groups(self) -> bool:
        return bool(self.traits().scope == "group")

    def _group(self, number: int) -> PromptGroup:
        return [
            Sample(
                group_index=number,
                index=number * self.group_size + position,
                prompt=copy.deepcopy(self.prompts[number]),
                label=self.label,
                metadata=copy.deepcopy(self.metadata),
            )
            for position in range(self.group_size)
        ]


def make_engine(*, version: str = VERSION) -> FakeEngine:
    """Return the engine of the suite, which samples lower-case letters."""
    return FakeEngine(vocab_size=NUM_SAMPLED_IDS, context_length=CONTEXT_LENGTH, version=version)


def make_context(
    client: Client, encoder: PromptEncoder, *, evaluation: bool = False, rollout: int = 0
) -> GenerateContext:
    """Return the context that a run passes to a generate function with :data:`SAMPLING`."""
    return GenerateContext(
        client, encoder, evaluation, rollout, max_response_len=SAMPLING.max_new_tokens, context_length=CONTEXT_LENGTH
    )


def require_sampled(sample: Sample, sampled: list[tuple[list[int], list[int]]]) -> None:
    """Check that the engine sampled every trained id at its place, from the ids before it."""
    tokens, covered = list(sample.tokens), set[int]()
    for prompt, response in sampled:
        together = [*prompt, *response]
        same = next((at for at, pair in enumerate(zip(tokens, together, strict=False)) if pair[0] != pair[1]), None)
        covered.update(range(len(prompt), min(len(tokens), len(together)) if same is None else same))
    start = len(tokens) - sample.response_length
    positions = [start + at for at, trained in enumerate(_mask(sample)) if trained and start + at not in covered]
    require(
        not positions,
        f"{_who(sample)} trains the ids {[tokens[at] for at in positions[:8]]} at the positions {positions[:8]} of its "
        "tokens, which the engine did not sample after those before them. Keep the ids that "
        "were sent and returned; text that is encoded again gives other ids. Mask ids that the engine did not sample.",
    )


def require_log_probs(sample: Sample, *, sampled: bool) -> None:
    """Check that every trained token has the engine's log-probability."""
    log_probs = sample.rollout_log_probs
    count = "none" if log_probs is None else str(len(log_probs))
    require(
        log_probs is not None and len(log_probs) == sample.response_length,
        f"{_who(sample)} has {sample.response_length} response tokens and {count} log-probabilities; one per response "
        "token is wanted, any number if it is masked",
    )
    trained = [log_prob for log_prob, mask in zip(log_probs or (), _mask(sample), strict=False) if mask]
    require(
        not sampled or all(math.isclose(log_prob, LOG_PROB, abs_tol=1e-6) for log_prob in trained),
        f"{_who(sample)} has the log-probabilities {trained[:8]} for trained tokens; the engine gave each {LOG_PROB}",
    )


def _mask(sample: Sample) -> list[int]:
    return [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)


def _who(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"
