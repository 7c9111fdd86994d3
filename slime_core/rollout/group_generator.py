"""The samples of one group are generated and, where each stands for itself, rewarded as they come.

A failure of the engines costs the samples that were asked for, and no others; whatever a generate function raises
besides is its plugin's, and ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress

from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.generation.outcome import fail, is_finished
from slime_core.generation.parents import Parents
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.rollout.component_router import RoutedComponent
from slime_core.rollout.guard import component_boundary, require_samples
from slime_core.rollout.reward_dispatcher import RewardDispatcher
from slime_core.rollout.run_all import run_all
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["GroupGenerator"]


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
