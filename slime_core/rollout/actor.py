"""The sampler as a Ray actor, and the handle through which the driver calls it. Tokens never pass through the
driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from slime_core.config.engine_key import send_key_to
from slime_core.plugins.lifecycle import Failures, PlaceStates
from slime_core.plugins.manifest import Manifest, attach
from slime_core.rollout.sampler import EvalSampler, Sampler, SamplerState
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.runtime.actors import Actor, Call, Ref, Watched, uncollected
from slime_core.runtime.waiting import Wait
from slime_core.types import TrainBatch

__all__ = ["SampledShards", "SamplerActor", "SamplerHandle"]


@dataclass(frozen=True, slots=True)
class SampledShards:
    """One rollout as the driver sees it: references to one shard a data-parallel rank, and metrics."""

    refs: list[Ref[TrainBatch]]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)


class SamplerActor(Watched):
    """Runs a :class:`~slime_core.rollout.sampler.Sampler`, or what only evaluates, with exactly the driver's plugins;
    shards go into the object store, references come back."""

    _sampler: Sampler | EvalSampler  # once setup() has returned
    _train_sampler: Sampler  # the same, of a process whose rollouts are trained

    def __init__(self, manifest: Manifest) -> None:
        # Before setup(), because its argument holds options, which are objects of the plugins' classes.
        self._manifest = manifest
        self._registry = attach(manifest)

    async def setup(self, settings: SamplerSettings) -> None:
        """Load data, tokenizer and components."""
        send_key_to(settings.router_url, *settings.engine_urls, *settings.model_urls.values())
        with uncollected():
            if settings.trains:
                self._sampler = self._train_sampler = Sampler(settings, self._registry, manifest=self._manifest)
            else:
                self._sampler = EvalSampler(settings, self._registry, manifest=self._manifest)

    async def sample(self, rollout: int) -> SampledShards:
        """Collect and pack one rollout."""
        sampled = await self._train_sampler.sample(rollout)
        # Wrapped in a list, a reference is passed on as it is; bare, Ray would fetch the shard into the driver.
        refs = [ray.put(shard) for shard in sampled.shards]
        failures = self._train_sampler.hooks.failures.take()
        return SampledShards(refs, sampled.metrics, sampled.warnings, failures)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Measure every evaluation set."""
        return await self._sampler.evaluate(step)

    async def published(self, version: int) -> None:
        """The engines serve ``version``."""
        self._train_sampler.published(version)

    async def state(self) -> SamplerState:
        """What a checkpoint holds of the sampler; one call, so that nothing moves between its parts."""
        return self._train_sampler.state()

    async def restore(self, cursor: dict[str, Any], states: PlaceStates) -> None:
        """Continue the data where ``cursor`` was taken, and the plugins with their states."""
        self._train_sampler.restore(cursor)
        self._train_sampler.hooks.restore(states)

    async def close(self) -> None:
        """End what is in flight, and close connections."""
        await self._sampler.close()


class SamplerHandle:
    """The sampler as the loop calls it; every wait is watched.

    Arguments:
        actor: runs the sampler.
        wait: waits for calls under the run's limits.
        warn: receives what a person should read, such as samples that were lost.
        failures: receives what watching plugins got wrong in the sampler.
    """

    def __init__(
        self,
        actor: Actor[SamplerActor],
        *,
        wait: Wait,
        warn: Callable[[str], None],
        failures: Failures,
    ) -> None:
        self._actor = actor
        self._wait = wait
        self._warn = warn
        self._failures = failures

    def setup(self, settings: SamplerSettings) -> Call[None]:
        """Start loading; the caller waits."""
        return self._actor.start(SamplerActor.setup, settings)

    def sample(self, rollout: int) -> SampledShards:
        """Collect and pack rollout ``rollout``."""
        (result,) = self._wait([self._actor.start(SamplerActor.sample, rollout)], what=f"rollout {rollout}")
        for warning in result.warnings:
            self._warn(f"rollout {rollout}: {warning}")
        self._failures.merge(result.failures)
        return result

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure every evaluation set with the weights that the engines hold."""
        call = self._actor.start(SamplerActor.evaluate, step)
        return self._wait([call], what=f"the evaluation after {step} steps")[0]

    def before_publish(self) -> None:
        """Nothing to wait for: an evaluation has ended when :meth:`evaluate` returns."""

    def published(self, version: int) -> None:
        """The engines serve ``version``; groups ahead of training may be admitted."""
        self._wait([self._actor.start(SamplerActor.published, version)], what="the sampler to go on")

    def state(self) -> SamplerState:
        """Where the data stands, and what the plugins of the sampler want to find in a checkpoint."""
        return self._wait([self._actor.start(SamplerActor.state)], what="the state of the sampler")[0]

    def restore(self, cursor: dict[str, Any], states: PlaceStates) -> None:
        """Continue the data where ``cursor`` was taken, and the plugins with their states."""
        self._wait([self._actor.start(SamplerActor.restore, cursor, states)], what="the data cursor")

    def close(self) -> None:
        """Let the sampler close its connections."""
        self._wait([self._actor.start(SamplerActor.close)], what="the sampler to close")
