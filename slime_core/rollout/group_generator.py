"""Generates and rewards prompt groups: all samples concurrently, every failure on its own sample.

    train_sampling, eval_sampling, apply_row_sampling   sampling parameters of a run, an evaluation set, a row
    GroupCollector   generates and rewards whole groups, with retries
    GroupGenerator   one attempt: calls the generate function for the samples of one group

A row may name its own generate function and reward model (:mod:`slime_core.prompts.named`). A reward model that takes
one sample scores it as soon as it is generated; one that takes groups waits for the whole group, retries included.

A failure of the engines fails the samples of that call only. Any other exception of a generate function ends the run,
because it is a bug of its plugin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any

from slime_core.config.eval_sets import EvalSet
from slime_core.config.schema import RolloutConfig, RunConfig
from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.generation.context import Parents
from slime_core.generation.trajectory import UNANSWERED, fail, is_finished
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.prompts.row_sampling import own_sampling
from slime_core.rollout.components import ComponentRouter, RoutedComponent, component_boundary, require_samples, run_all
from slime_core.rollout.engines.client import ABORT_INTERVAL_S, OVERLOADED
from slime_core.rollout.requeue import prepare_group, reset_sample
from slime_core.rollout.rewards.scoring import RewardDispatcher
from slime_core.types import PromptGroup, Sample, Status

__all__ = [
    "GroupCollector",
    "GroupGenerator",
    "apply_row_sampling",
    "eval_sampling",
    "mark_missing_failed",
    "train_sampling",
    "truncates",
]

NAMED = frozenset(one.name for one in fields(SamplingParams)) - {"extra", "max_kept"}


def truncates(rollout: RolloutConfig) -> bool:
    """Whether top-p or top-k leaves something out to draw from."""
    return rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1


def train_sampling(config: RunConfig, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """What the settings of ``[rollout]`` ask for; ``end_ids``, those of the model, end a response too."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_kept=rollout.rollout_max_kept_tokens,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=(*rollout.rollout_stop_token_ids, *end_ids),
    )


def eval_sampling(one: EvalSet, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """What an evaluation set asks for."""
    penalty = one.repetition_penalty
    return SamplingParams(
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        max_new_tokens=one.max_response_len,
        min_new_tokens=one.min_new_tokens,
        stop=one.stop,
        stop_token_ids=(*one.stop_token_ids, *end_ids),
        max_kept=None,  # nothing is trained on them
        extra={} if penalty is None else {"repetition_penalty": penalty},
    )


def apply_row_sampling(
    sample: Sample, context: GenerateContext, sampling: SamplingParams
) -> tuple[GenerateContext, SamplingParams]:
    """``context`` and ``sampling`` with what the sample's row wants instead, as a generate function gets them; see
    :mod:`slime_core.prompts.row_sampling`.

    Ids of the row that end a response do so besides those of ``sampling``, among which are the model's.

    Raises:
        DataError: it wants what does not exist, or what cannot be trained on.
    """
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    where = f"sample {sample.index} of group {sample.group_index}"
    own = own_sampling(sample.metadata, drawn=None if context.evaluation else drawn, where=where)
    sampling = _with(sampling, own) if own else sampling
    return replace(context, max_response_len=sampling.max_new_tokens), sampling


def _with(sampling: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    named = {key: value for key, value in own.items() if key in NAMED}
    extra = {key: value for key, value in own.items() if key not in NAMED}
    if "stop_token_ids" in named:
        named["stop_token_ids"] = (*named["stop_token_ids"], *sampling.stop_token_ids)
    return replace(sampling, **named, extra={**sampling.extra, **extra})


FINAL = {*OVERLOADED.values(), "reward_refused", "reward_too_long"}
"""Causes of failures after which a sample is not generated again: an engine or a service refused (4xx)."""

NOT_RETURNED = "not_returned"
"""Cause of a failure: the generate function left the sample out."""


class GroupCollector:
    """Generates and scores with what each sample asks for.

    Arguments:
        generators, rewards: the components to choose from.
        rollout: says which of several rewards trains, and what a failed sample does.
        hooks: of plugins that see samples before they are rewarded; None: there are none.
    """

    def __init__(
        self,
        generators: ComponentRouter,
        rewards: ComponentRouter,
        *,
        rollout: RolloutConfig,
        hooks: LifecycleHooks | None = None,
    ) -> None:
        self._generators, self._rewards, self._rollout = generators, rewards, rollout
        self._hooks, self._scoring = hooks, RewardDispatcher(rollout)
        self._num_retries = rollout.failed_sample_retries if rollout.failed_samples == "retry" else 0
        self._retries: Counter[str] = Counter()

    def prepare_group(self, group: PromptGroup, *, is_stale: bool = False) -> None:
        """Make ``group`` ready to be generated: anew, or, where responses that were ended go on, from what it has.

        Arguments:
            is_stale: what it has can be trained no more, so it begins anew.
        """
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        prepare_group(group, generator, reward, resumes=self._rollout.partial_rollout and not is_stale)

    async def collect(
        self, context: GenerateContext, groups: Sequence[PromptGroup], sampling: SamplingParams
    ) -> list[PromptGroup]:
        """All groups, in their order; the client bounds the requests in flight.

        A sample that no engine answered in time is ``FAILED``, with the reason.

        Raises:
            RequestRefused: an engine will never take such a request.
            RunError: a reward model that runs here returned too few or too many rewards.
            PluginError: a generate function failed or returned no sample, or the processes of reward models cannot load
                the plugins.
            DataError: a row names a component that no active plugin offers.
        """
        return await run_all(self._group(context, group, sampling) for group in groups)

    async def reward_missing(self, groups: Sequence[PromptGroup]) -> None:
        """Score those samples of groups that somebody else made and that have no reward yet; raises as
        :meth:`collect` does."""
        missing = [[sample for sample in group if sample.reward is None] for group in groups]
        await run_all(self._scoring.score(self._rewards.of(samples[0]), samples) for samples in missing if samples)

    def unanswered(self, samples: Sequence[Sample]) -> None:
        """Count samples of an evaluation that no engine has answered as wrong, under the cause ``engine``."""
        self._scoring.unanswered(samples)

    def take_failures(self) -> dict[str, float]:
        """Cause -> samples that have no reward of their own, since this was last asked."""
        return self._scoring.take_failures()

    def take_retries(self) -> dict[str, float]:
        """Cause -> samples that were generated again for it, since this was last asked."""
        taken, self._retries = self._retries, Counter()
        return {cause: float(count) for cause, count in taken.items()}

    async def _group(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        # The samples of a prompt share its row, and so what the row names.
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        context, sampling = apply_row_sampling(group[0], context, sampling)
        making = GroupGenerator(
            generator=generator,
            # A reward that compares samples waits for all of them, those of a second try included.
            reward=None if reward.takes_groups else reward,
            context=context,
            sampling=sampling,
            hooks=self._hooks,
            scoring=self._scoring,
        )
        samples = await making.made(group)
        if context.evaluation:
            samples = await self._gone_on(making, reward, samples)
        else:
            samples = await self._tried_again(making, samples)
        samples.sort(key=_place_in(group))
        if reward.takes_groups:
            return await self._scoring.score(reward, samples, evaluation=context.evaluation)
        return samples

    async def _gone_on(self, making: GroupGenerator, reward: RoutedComponent, samples: list[Sample]) -> list[Sample]:
        """``samples`` of an evaluation; those that somebody ended go on, for as long as a request may take.

        Over-sampling ends all that engines have, and an evaluation may be beside it (``eval_interleaved``).
        """
        deadline_s = time.monotonic() + self._rollout.rollout_request_timeout_s
        while any(sample.status is Status.ABORTED for sample in samples) and time.monotonic() < deadline_s:
            await asyncio.sleep(ABORT_INTERVAL_S)
            prepare_group(samples, making.generator, reward, resumes=True)
            samples = await making.made(samples)
        return samples

    async def _tried_again(self, making: GroupGenerator, samples: list[Sample]) -> list[Sample]:
        """``samples``, those that failed as often again as the run allows (``failed_sample_retries``)."""
        for _ in range(self._num_retries):
            failed = [sample for sample in samples if _is_repeatable(sample)]
            if not failed:
                break
            others = [sample for sample in samples if not _is_repeatable(sample)]
            self._retries.update(sample.failure_cause or UNANSWERED for sample in failed)
            for sample in failed:
                reset_sample(sample)
            samples = [*others, *await making.made(failed)]
        return samples


def _is_repeatable(sample: Sample) -> bool:
    """Whether it failed for what may pass and stands alone: no single one of siblings can be made again."""
    return sample.status is Status.FAILED and sample.rollout_id is None and sample.failure_cause not in FINAL


def mark_missing_failed(given: PromptGroup, made: PromptGroup) -> list[Sample]:
    """Samples of ``given`` of which the generate function returned none, as failed ones."""
    there = {sample.index for sample in made}
    lost = [sample for sample in given if sample.index not in there]
    error = "the generate function did not return it"
    return [replace(one, status=Status.FAILED, reward=None, error=error, failure_cause=NOT_RETURNED) for one in lost]


def _place_in(group: PromptGroup) -> Callable[[Sample], int]:
    """The order of a group, by the numbers of its samples; what nobody knows comes last."""
    places = {sample.index: place for place, sample in enumerate(group)}
    return lambda sample: places.get(sample.index, len(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGenerator:
    """How the samples of a group are made, however often that is tried.

    Arguments:
        generator: makes them.
        reward: scores each as soon as it is there; None: they are scored as a group, later.
        context, sampling: what ``generator`` is handed beside them.
        hooks: of plugins that see samples before they are rewarded; None: there are none.
        scoring: asks ``reward``.
    """

    generator: RoutedComponent
    reward: RoutedComponent | None
    context: GenerateContext
    sampling: SamplingParams
    hooks: LifecycleHooks | None
    scoring: RewardDispatcher

    async def made(self, group: PromptGroup) -> list[Sample]:
        """What became of ``group``; what is finished already stays as it is.

        Raises:
            RequestRefused: an engine will never take such a request.
            PluginError: the generate function failed or returned no sample.
        """
        if not self.generator.takes_groups:
            answers = await run_all(self._single(sample) for sample in group)
            return [sample for answer in answers for sample in answer]
        finished = {id(sample) for sample in group if is_finished(sample)}
        samples = await self._generated(group)
        hooked = iter(await self._hooked([sample for sample in samples if id(sample) not in finished]))
        return await self._rewarded([one if id(one) in finished else next(hooked) for one in samples])

    async def _single(self, sample: Sample) -> list[Sample]:
        """What one generation made of ``sample``."""
        samples = [sample] if is_finished(sample) else await self._hooked(await self._generated([sample]))
        return await self._rewarded(samples)

    async def _generated(self, samples: PromptGroup) -> list[Sample]:
        """What the generate function returned for ``samples``: a whole group, or the one that it takes."""
        finished = [is_finished(sample) for sample in samples]
        parents = Parents.of(samples)
        asked = samples if self.generator.takes_groups else samples[0]
        try:
            with component_boundary(self.generator.plugin, f"generate function {self.generator.name!r}"):
                answer = await self.generator.component(self.context, asked, self.sampling)
        except RequestRefused:
            raise
        except Interrupted as interrupted:
            answer = _aborted(samples) if self.generator.takes_groups else interrupted.sample
        except EngineError as failure:
            # What was finished when it was handed over, beside responses that go on, is not lost with them.
            answer = [one if is_done else _failed(one, failure) for one, is_done in zip(samples, finished, strict=True)]
        made = require_samples(self.generator, answer)
        parents.adopt(made)
        return made

    async def _hooked(self, samples: list[Sample]) -> list[Sample]:
        """Samples after the plugins that see those that have an answer."""
        hooks = self.hooks
        if hooks is None or not hooks.implementers("slime_after_generate"):
            return samples
        answered = list(map(is_finished, samples))
        hooked = iter(await run_all(hooks.after_generate(one, self.context) for one in compress(samples, answered)))
        return [next(hooked) if is_seen else one for one, is_seen in zip(samples, answered, strict=True)]

    async def _rewarded(self, samples: list[Sample]) -> list[Sample]:
        if self.reward is None:
            return samples
        return await self.scoring.score(self.reward, samples, evaluation=self.context.evaluation)


def _aborted(samples: PromptGroup) -> list[Sample]:
    """The samples of a group that a generate function left when a turn was aborted."""
    for sample in samples:
        sample.status = Status.ABORTED if sample.status is Status.PENDING else sample.status
    return samples


def _failed(sample: Sample, failure: EngineError) -> Sample:
    found = replace(sample)
    fail(found, failure)
    return found
