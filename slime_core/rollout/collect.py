"""From prompt groups to finished, rewarded groups: everything in flight at once, every failure on its own sample.

A row may name its own generate function and reward model (:mod:`slime_core.data.named`). Those that take one sample and
those that take whole groups live side by side: a sample is rewarded as soon as it is there, or with its group.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime_core.config.schema import RolloutConfig
from slime_core.errors import EngineError, RequestRefused
from slime_core.rollout.choice import Choice, Chosen
from slime_core.rollout.client import SamplingParams
from slime_core.rollout.functions import NoFunctions, RolloutFunctions
from slime_core.rollout.generate import GenerateContext
from slime_core.rollout.reward_pool import RewardFailure
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["TRAINABLE", "Collector"]

TRAINABLE = (Status.COMPLETED, Status.TRUNCATED)


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

    async def collect(
        self, context: GenerateContext, groups: Sequence[PromptGroup], sampling: SamplingParams
    ) -> list[PromptGroup]:
        """All groups, in their order; the client bounds the requests in flight.

        A sample that no engine answered in time is ``FAILED``, with the reason.

        Raises:
            RequestRefused: an engine will never take such a request.
            RunError: a reward model that runs here returned too few or too many rewards.
            PluginError: the processes of reward models cannot load the plugins.
            DataError: a row names a component that no active plugin offers.
        """
        return list(await asyncio.gather(*(self._group(context, group, sampling) for group in groups)))

    async def _group(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        # The samples of a prompt share its row, and so what the row names.
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        if generator.takes_groups:
            made = await self._whole(generator, context, group, sampling)
            return await self._rewarded(reward, await self._hooked(context, made), evaluation=context.evaluation)
        at_once = None if reward.takes_groups else reward
        answers = await asyncio.gather(
            *(self._single(generator, at_once, context, sample, sampling) for sample in group)
        )
        samples = [sample for answer in answers for sample in answer]
        if reward.takes_groups:
            return await self._rewarded(reward, samples, evaluation=context.evaluation)
        return samples

    async def _whole(
        self, generator: Chosen, context: GenerateContext, group: PromptGroup, sampling: SamplingParams
    ) -> PromptGroup:
        try:
            return list(await generator.component(context, group, sampling))
        except RequestRefused:
            raise
        except EngineError as failure:
            return [_failed(sample, failure) for sample in group]

    async def _single(
        self,
        generator: Chosen,
        reward: Chosen | None,
        context: GenerateContext,
        sample: Sample,
        sampling: SamplingParams,
    ) -> list[Sample]:
        """What one generation made of ``sample``, rewarded at once; ``reward`` None: whole groups are, later."""
        try:
            answer = await generator.component(context, sample, sampling)
        except RequestRefused:
            raise
        except EngineError as failure:
            return [_failed(sample, failure)]
        samples = answer if isinstance(answer, list) else [answer]
        for one in samples:
            _inherit(one, sample)
        samples = await self._hooked(context, samples)
        if reward is None:
            return samples
        return await self._rewarded(reward, samples, evaluation=context.evaluation)

    async def _hooked(self, context: GenerateContext, samples: list[Sample]) -> list[Sample]:
        return await self._functions.generated(samples, context)

    async def reward_missing(self, group: PromptGroup) -> None:
        """Score those samples of a group that somebody else made and that have no reward yet."""
        missing = [sample for sample in group if sample.reward is None]
        if missing:
            await self._rewarded(self._rewards.of(missing[0]), missing)

    async def _rewarded(self, reward_model: Chosen, samples: list[Sample], *, evaluation: bool = False) -> list[Sample]:
        scorable = [sample for sample in samples if sample.status in TRAINABLE]
        for sample, answer in zip(scorable, await reward_model.component.score(scorable), strict=True):
            reward = answer if self._is_usable(answer) else self._refused(reward_model.name, answer)
            if isinstance(reward, RewardFailure):
                self._fail(sample, reward, evaluation=evaluation)
            else:
                sample.reward = reward
        return samples

    def _is_usable(self, answer: Any) -> bool:
        if isinstance(answer, dict):
            answer = answer.get(self._rollout.reward_key or "")
        return isinstance(answer, RewardFailure) or (isinstance(answer, int | float) and math.isfinite(answer))

    def _refused(self, name: str, answer: Any) -> RewardFailure:
        accepted = "accepted is a finite number or a dict of them with --reward-key"
        return RewardFailure("invalid", f"reward model {name!r} returned {answer!r}; {accepted}")

    def _fail(self, sample: Sample, failure: RewardFailure, *, evaluation: bool) -> None:
        """A response that nobody could score is not trained on; an evaluation counts it as wrong."""
        self._failures[failure.cause] += 1
        sample.error = failure.error
        if evaluation:
            key = self._rollout.reward_key
            sample.reward = 0.0 if key is None else {key: 0.0}
        else:
            sample.status = Status.FAILED

    def take_failures(self) -> dict[str, float]:
        """Cause -> samples that no reward model could score, since this was last asked."""
        taken = {cause: float(count) for cause, count in self._failures.items()}
        self._failures.clear()
        return taken


def _failed(sample: Sample, failure: EngineError) -> Sample:
    return replace(sample, status=Status.FAILED, error=str(failure))


def _inherit(made: Sample, parent: Sample) -> None:
    """A sample that a generate function made belongs to the group of the one it was made from."""
    made.group_index = parent.group_index if made.group_index is None else made.group_index
    made.index = parent.index if made.index is None else made.index
