"""From prompt groups to finished, rewarded groups: everything in flight at once, every failure on its own sample.

A row may name its own generate function and reward model (:mod:`slime_core.data.named`). Those that take one sample and
those that take whole groups live side by side: a sample is rewarded as soon as it is there, or with its group.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from numbers import Real
from typing import Any

from slime_core.config.schema import RolloutConfig
from slime_core.errors import EngineError, RequestRefused
from slime_core.rollout.choice import Choice, Chosen
from slime_core.rollout.engines.client import OVERLOADED
from slime_core.rollout.engines.ending import PAUSE_S
from slime_core.rollout.engines.generation import SamplingParams
from slime_core.rollout.functions import NoFunctions, RolloutFunctions
from slime_core.rollout.generate import GenerateContext
from slime_core.rollout.guard import guarded, made_by
from slime_core.rollout.lineage import Parents
from slime_core.rollout.resuming import UNANSWERED, anew, fail, is_finished, prepare
from slime_core.rollout.rewards.pool import RewardFailure
from slime_core.rollout.sampling import of_row
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["TRAINABLE", "Collector", "missing_of"]

TRAINABLE = (Status.COMPLETED, Status.TRUNCATED)

ACCEPTED = "accepted is a finite number or a dict of them with --reward-key"

LARGEST = sys.float_info.max
"""Of a whole number beyond it, math.isfinite raises."""

FINAL = {*OVERLOADED.values(), "reward_refused"}
"""Causes of failures after which a sample is not generated again: an engine or a service refused (4xx)."""

NOT_RETURNED = "not_returned"
"""Cause of a failure: the generate function left the sample out."""


class Collector:
    """Generates and scores with what each sample asks for.

    Arguments:
        generators, rewards: the components to choose from.
        rollout: says which of several rewards trains.
        functions: those of the run that see samples before they are rewarded; None: there are none.
    """

    def __init__(
        self,
        generators: Choice,
        rewards: Choice,
        *,
        rollout: RolloutConfig,
        functions: RolloutFunctions | None = None,
    ) -> None:
        self._generators, self._rewards, self._rollout = generators, rewards, rollout
        self._functions = functions or NoFunctions()
        self._failures: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()

    def prepare(self, group: PromptGroup, *, too_old: bool = False) -> None:
        """Make ``group`` ready to be generated: anew, or, where responses that were ended go on, from what it has.

        Arguments:
            too_old: what it has can be trained no more, so it begins anew.
        """
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        prepare(group, generator, reward, resumes=self._rollout.partial_rollout and not too_old)

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
        return list(await asyncio.gather(*(self._group(context, group, sampling) for group in groups)))

    async def _group(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        # The samples of a prompt share its row, and so what the row names.
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        sampling = of_row(group[0], sampling, evaluation=context.evaluation)
        # A reward that compares samples waits for all of them, those of a second try included.
        at_once = None if reward.takes_groups else reward
        samples = await self._made(generator, at_once, context, group, sampling)
        if context.evaluation:
            samples = await self._unended(generator, reward, context, samples, sampling)
        for _ in range(0 if context.evaluation else self._num_retries):
            failed = [sample for sample in samples if _may_pass(sample)]
            if not failed:
                break
            self._retries.update(sample.failure_cause or UNANSWERED for sample in failed)
            others = [sample for sample in samples if not any(sample is one for one in failed)]
            for sample in failed:
                anew(sample)
            samples = [*others, *await self._made(generator, at_once, context, failed, sampling)]
        samples.sort(key=_place_in(group))
        if reward.takes_groups:
            return await self._rewarded(reward, samples, evaluation=context.evaluation)
        return samples

    async def _unended(
        self,
        generator: Chosen,
        reward: Chosen,
        context: GenerateContext,
        samples: PromptGroup,
        sampling: SamplingParams,
    ) -> PromptGroup:
        """``samples`` of an evaluation; those that somebody ended go on, for as long as a request may take.

        Over-sampling ends all that engines have, and an evaluation may be beside it (``eval_interleaved``).
        """
        deadline_s = time.monotonic() + self._rollout.rollout_request_timeout_s
        while any(sample.status is Status.ABORTED for sample in samples) and time.monotonic() < deadline_s:
            await asyncio.sleep(PAUSE_S)
            prepare(samples, generator, reward, resumes=True)
            at_once = None if reward.takes_groups else reward
            samples = await self._made(generator, at_once, context, samples, sampling)
        return samples

    @property
    def _num_retries(self) -> int:
        return self._rollout.failed_sample_retries if self._rollout.failed_samples == "retry" else 0

    async def _made(
        self,
        generator: Chosen,
        reward: Chosen | None,
        context: GenerateContext,
        group: PromptGroup,
        sampling: SamplingParams,
    ) -> list[Sample]:
        """What ``generator`` made of ``group``; ``reward`` None: it is rewarded as a whole, later."""
        if not generator.takes_groups:
            answers = await asyncio.gather(
                *(self._single(generator, reward, context, sample, sampling) for sample in group)
            )
            return [sample for answer in answers for sample in answer]
        finished = {id(sample) for sample in group if is_finished(sample)}
        samples = await self._whole(generator, context, group, sampling)
        seen = [sample for sample in samples if id(sample) not in finished]
        hooked = iter(await self._hooked(context, seen))
        samples = [sample if id(sample) in finished else next(hooked) for sample in samples]
        return samples if reward is None else await self._rewarded(reward, samples, evaluation=context.evaluation)

    async def _whole(
        self, generator: Chosen, context: GenerateContext, group: PromptGroup, sampling: SamplingParams
    ) -> PromptGroup:
        finished = [is_finished(sample) for sample in group]
        parents = Parents.of(group)
        try:
            with guarded(generator.plugin, f"generate function {generator.name!r}"):
                answer = await generator.component(context, group, sampling)
        except RequestRefused:
            raise
        except EngineError as failure:
            # What was finished when it was handed over, beside responses that go on, is not lost with them.
            answer = [one if is_done else _failed(one, failure) for one, is_done in zip(group, finished, strict=True)]
        samples = made_by(generator, answer)
        parents.adopt(samples)
        return samples

    async def _single(
        self,
        generator: Chosen,
        reward: Chosen | None,
        context: GenerateContext,
        sample: Sample,
        sampling: SamplingParams,
    ) -> list[Sample]:
        """What one generation made of ``sample``, rewarded at once; ``reward`` None: whole groups are, later."""
        if is_finished(sample):
            return [sample] if reward is None else await self._rewarded(reward, [sample], evaluation=context.evaluation)
        parents = Parents.of([sample])
        try:
            with guarded(generator.plugin, f"generate function {generator.name!r}"):
                answer = await generator.component(context, sample, sampling)
        except RequestRefused:
            raise
        except EngineError as failure:
            lost = [_failed(sample, failure)]
            parents.adopt(lost)
            return lost
        samples = made_by(generator, answer)
        parents.adopt(samples)
        samples = await self._hooked(context, samples)
        if reward is None:
            return samples
        return await self._rewarded(reward, samples, evaluation=context.evaluation)

    async def _hooked(self, context: GenerateContext, samples: list[Sample]) -> list[Sample]:
        """Samples after the hooks of the run, which see those that have an answer."""
        answered = [sample.status in TRAINABLE for sample in samples]
        seen = list(compress(samples, answered))
        hooked = iter(await self._functions.generated(seen, context))
        return [next(hooked) if is_seen else one for one, is_seen in zip(samples, answered, strict=True)]

    async def reward_missing(self, group: PromptGroup) -> None:
        """Score those samples of a group that somebody else made and that have no reward yet."""
        missing = [sample for sample in group if sample.reward is None]
        if missing:
            await self._rewarded(self._rewards.of(missing[0]), missing)

    async def _rewarded(self, reward_model: Chosen, samples: list[Sample], *, evaluation: bool = False) -> list[Sample]:
        """The samples; those without a reward are scored, and one that the generate function has given stays."""
        scorable = [sample for sample in samples if sample.status in TRAINABLE]
        missing = [sample for sample in scorable if sample.reward is None]
        given = [(sample, sample.reward) for sample in scorable if sample.reward is not None]
        answers = await reward_model.component.score(missing) if missing else []
        for sample, answer in zip(missing, answers, strict=True):
            self._settle(sample, answer, f"reward model {reward_model.name!r} returned", evaluation=evaluation)
        for sample, own in given:
            self._settle(sample, own, "the generate function gave the reward", evaluation=evaluation)
        return samples

    def _settle(self, sample: Sample, answer: Any, whence: str, *, evaluation: bool) -> None:
        reward = float(answer) if isinstance(answer, Real) and not isinstance(answer, int | float) else answer
        if not self._is_usable(reward, sample.reward_key(self._rollout.reward_key)):
            own = f" (its row names {sample.reward_key()})" if sample.reward_key() else ""
            reward = RewardFailure("invalid", f"{whence} {answer!r:.200}; {ACCEPTED}{own}")
        if isinstance(reward, RewardFailure):
            self._fail(sample, reward, evaluation=evaluation)
        else:
            sample.reward = reward

    def _is_usable(self, answer: Any, key: str | None) -> bool:
        if isinstance(answer, dict):
            answer = answer.get(key or "")
        return isinstance(answer, RewardFailure) or (isinstance(answer, int | float) and abs(answer) <= LARGEST)

    def _fail(self, sample: Sample, failure: RewardFailure, *, evaluation: bool) -> None:
        """A response that nobody could score is not trained on; an evaluation counts it as wrong."""
        self._failures[failure.cause] += 1
        sample.error, sample.failure_cause = failure.error, f"reward_{failure.cause}"
        if evaluation:
            self._count_as_wrong(sample)
        else:
            sample.status, sample.reward = Status.FAILED, None

    def unanswered(self, samples: Sequence[Sample]) -> None:
        """Count samples of an evaluation that no engine has answered as wrong, under the cause ``engine``."""
        for sample in samples:
            self._failures[UNANSWERED] += 1
            self._count_as_wrong(sample)

    def _count_as_wrong(self, sample: Sample) -> None:
        key = sample.reward_key(self._rollout.reward_key)
        sample.reward = 0.0 if key is None else {key: 0.0}

    def take_retries(self) -> dict[str, float]:
        """Cause -> samples that were generated again for it, since this was last asked."""
        taken = {cause: float(count) for cause, count in self._retries.items()}
        self._retries.clear()
        return taken

    def take_failures(self) -> dict[str, float]:
        """Cause -> samples that have no reward of their own, since this was last asked."""
        taken = {cause: float(count) for cause, count in self._failures.items()}
        self._failures.clear()
        return taken


def _may_pass(sample: Sample) -> bool:
    """Whether a failed sample may be generated again."""
    return sample.status is Status.FAILED and sample.rollout_id is None and sample.failure_cause not in FINAL


def _failed(sample: Sample, failure: EngineError) -> Sample:
    found = replace(sample)
    fail(found, failure)
    return found


def missing_of(given: PromptGroup, made: PromptGroup) -> list[Sample]:
    """Samples of ``given`` of which the generate function returned none, as failed ones."""
    there = {sample.index for sample in made}
    lost = [sample for sample in given if sample.index not in there]
    error = "the generate function did not return it"
    return [replace(one, status=Status.FAILED, reward=None, error=error, failure_cause=NOT_RETURNED) for one in lost]


def _place_in(group: PromptGroup) -> Callable[[Sample], int]:
    """The order of a group, by the numbers of its samples; what nobody knows comes last."""
    places = {sample.index: place for place, sample in enumerate(group)}
    return lambda sample: places.get(sample.index, len(places))
