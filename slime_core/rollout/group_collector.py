"""From prompt groups to finished, rewarded groups: everything in flight at once, every failure on its own sample.

    making     the samples of one group, generated and rewarded (:mod:`slime_core.rollout.group_generator`)
    scoring    whose reward counts, and what becomes of those without one (:mod:`slime_core.rollout.reward_dispatcher`)
    collect    all of it for whole groups, with second tries

A row may name its own generate function and reward model (:mod:`slime_core.prompts.named`). Those that take one sample
and those that take whole groups live side by side: a sample is rewarded as soon as it is there, or with its group.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from slime_core.config.schema import RolloutConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.generation.outcome import UNANSWERED
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.rollout.component_router import ComponentRouter, RoutedComponent
from slime_core.rollout.engines.client import ABORT_INTERVAL_S, OVERLOADED
from slime_core.rollout.group_generator import GroupGenerator
from slime_core.rollout.resumable_groups import prepare_group, reset_sample
from slime_core.rollout.reward_dispatcher import RewardDispatcher
from slime_core.rollout.run_all import run_all
from slime_core.rollout.sampling_params import apply_row_sampling
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["GroupCollector", "mark_missing_failed"]

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
