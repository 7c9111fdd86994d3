"""From prompt groups to finished, rewarded groups: everything in flight at once, every failure on its own sample."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime_core.config.schema import RolloutConfig
from slime_core.errors import EngineError, RequestRefused, RunError
from slime_core.plugins.component import Kind
from slime_core.plugins.registry import Registry
from slime_core.rollout.client import SamplingParams
from slime_core.rollout.functions import NoFunctions, RolloutFunctions
from slime_core.rollout.generate import GenerateContext
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["TRAINABLE", "Collector"]

TRAINABLE = (Status.COMPLETED, Status.TRUNCATED)


class Collector:
    """Generates with the run's generate function and scores with its reward model.

    Arguments:
        generate, reward: the components.
        registry: says how each wants to be called.
        rollout: names them, and says which of several rewards trains.
        functions: those of the run that see samples before they are rewarded; None: there are none.
    """

    def __init__(
        self,
        generate: Any,
        reward: Any,
        *,
        registry: Registry,
        rollout: RolloutConfig,
        functions: RolloutFunctions | None = None,
    ) -> None:
        generating: Any = registry.find(Kind.GENERATE_FUNCTION, rollout.generate_function).traits
        rewarding: Any = registry.find(Kind.REWARD_MODEL, rollout.rm_type).traits
        self._generate, self._reward, self._rollout = generate, reward, rollout
        self._functions = functions or NoFunctions()
        self._generates_groups = generating.scope == "group"
        self._rewards_at_once = rewarding.scope == "sample"

    async def collect(
        self, context: GenerateContext, groups: Sequence[PromptGroup], sampling: SamplingParams
    ) -> list[PromptGroup]:
        """All groups, in their order; the client bounds the requests in flight.

        A sample that no engine answered in time is ``FAILED``, with the reason.

        Raises:
            RequestRefused: an engine will never take such a request.
            RunError: the reward model broke its contract.
        """
        return list(await asyncio.gather(*(self._group(context, group, sampling) for group in groups)))

    async def _group(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        if self._generates_groups:
            return await self._rewarded(await self._hooked(context, await self._whole(context, group, sampling)))
        answers = await asyncio.gather(*(self._single(context, sample, sampling) for sample in group))
        samples = [sample for answer in answers for sample in answer]
        return samples if self._rewards_at_once else await self._rewarded(samples)

    async def _whole(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        try:
            return list(await self._generate(context, group, sampling))
        except RequestRefused:
            raise
        except EngineError as failure:
            return [_failed(sample, failure) for sample in group]

    async def _single(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> list[Sample]:
        """What one generation made of ``sample``, rewarded at once unless the reward model wants whole groups."""
        try:
            answer = await self._generate(context, sample, sampling)
        except RequestRefused:
            raise
        except EngineError as failure:
            return [_failed(sample, failure)]
        samples = answer if isinstance(answer, list) else [answer]
        for one in samples:
            _inherit(one, sample)
        samples = await self._hooked(context, samples)
        return await self._rewarded(samples) if self._rewards_at_once else samples

    async def _hooked(self, context: GenerateContext, samples: list[Sample]) -> list[Sample]:
        return await self._functions.generated(samples, context)

    async def reward_missing(self, group: PromptGroup) -> None:
        """Score those samples of a group that somebody else made and that have no reward yet."""
        await self._rewarded([sample for sample in group if sample.reward is None])

    async def _rewarded(self, samples: list[Sample]) -> list[Sample]:
        scorable = [sample for sample in samples if sample.status in TRAINABLE]
        rewards = await self._reward.score(scorable)
        name = self._rollout.rm_type
        if len(rewards) != len(scorable):
            raise RunError(f"reward model {name!r} returned {len(rewards)} rewards for {len(scorable)} samples")
        for sample, reward in zip(scorable, rewards, strict=True):
            sample.reward = reward
            if not self._is_usable(sample):
                raise RunError(
                    f"reward model {name!r} returned {reward!r} for sample {sample.index}; accepted is a finite number "
                    "or a dict of them with --reward-key"
                )
        return samples

    def _is_usable(self, sample: Sample) -> bool:
        reward = sample.reward
        if isinstance(reward, dict):
            reward = reward.get(self._rollout.reward_key or "")
        return reward is not None and math.isfinite(reward)


def _failed(sample: Sample, failure: EngineError) -> Sample:
    return replace(sample, status=Status.FAILED, error=str(failure))


def _inherit(made: Sample, parent: Sample) -> None:
    """A sample that a generate function made belongs to the group of the one it was made from."""
    made.group_index = parent.group_index if made.group_index is None else made.group_index
    made.index = parent.index if made.index is None else made.index
