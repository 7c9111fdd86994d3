"""The sampler as a Ray actor, and the handles through which the driver calls it. Tokens never pass through the driver.

    SamplerHandle          the sampler of the run
    ConcurrentEvalSampler  also evaluates while the learner trains, one evaluation at a time, with a separate sampler
                           that uses separate engines or those of the policy

The rule of concurrent evaluations: the weights that an evaluation measures do not change until it has ended. Engines
that only evaluate get the learner's weights when an evaluation starts. The policy's engines get new weights, or release
the devices that they share with the learner, after it has ended. A checkpoint is also written after it has ended, so
that a run that resumes there has the evaluation's row exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from slime_core.config.schema import RunConfig
from slime_core.config.secrets import send_key_to
from slime_core.plugins.lifecycle import PlaceStates
from slime_core.plugins.manifest import Manifest, attach
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import EvalSampler, SamplerCheckpoint, TrainSampler
from slime_core.runtime.actors import Actor, Call, Ref, Watched, control, show_tasks, uncollected
from slime_core.runtime.progress import Progress
from slime_core.runtime.waiting import Wait, has_ended
from slime_core.track.failures import Failures
from slime_core.types import TrainBatch

ALLOCATIONS = 100_000
"""Containers that a sampler allocates between two garbage collections. With Python's 700, collections take a third of a
rollout of 100,000 samples, whose objects nearly all stay until it ends (``python -m bench.growth``)."""


@dataclass(frozen=True, slots=True)
class SampledShards:
    """One rollout as the driver sees it: references to one shard a data-parallel rank, and metrics."""

    refs: list[Ref[TrainBatch]]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)


class SamplerActor(Watched):
    """Runs a sampler with exactly the driver's plugins; shards go into the object store, references come back."""

    _sampler: TrainSampler | EvalSampler  # once setup() has returned
    _train_sampler: TrainSampler  # the same object, if it trains

    def __init__(self, manifest: Manifest) -> None:
        # Before setup(): its argument holds options, whose classes plugins define.
        self._manifest = manifest
        self._registry = attach(manifest)
        self._before: SamplerCheckpoint | None = None  # the state before the last rollout
        self._progress: Callable[[], Progress | None] = lambda: None

    async def setup(self, settings: SamplerSettings) -> None:
        """Load data, tokenizer and components."""
        show_tasks()
        self._keeps_groups = settings.config.rollout.has_groups_across_rollouts
        send_key_to(settings.router_url, *settings.engine_urls, *settings.model_urls.values())
        with uncollected(allocations=ALLOCATIONS):
            if settings.trains:
                self._sampler = self._train_sampler = TrainSampler(settings, self._registry, manifest=self._manifest)
            else:
                self._sampler = EvalSampler(settings, self._registry, manifest=self._manifest)
        self._progress = self._sampler.progress

    async def sample(self, rollout: int) -> SampledShards:
        """Collect and pack one rollout."""
        self._before = None if self._keeps_groups else self._train_sampler.state()
        sampled = await self._train_sampler.sample(rollout)
        # In a list, because Ray would fetch the shard of a bare reference into the driver.
        refs = [ray.put(shard) for shard in sampled.shards]
        failures = self._train_sampler.hooks.failures.take()
        return SampledShards(refs, sampled.metrics, sampled.warnings, failures)

    @control
    def progress(self) -> Progress | None:
        """Return the progress of the rollout or the evaluation that runs."""
        return self._progress()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Measure every evaluation set."""
        return await self._sampler.evaluate(step)

    async def published(self, version: int) -> None:
        """Note that the engines serve ``version``."""
        self._train_sampler.published(version)

    async def state(self, *, without_last: bool) -> SamplerCheckpoint:
        """Return the sampler's part of a checkpoint, in one call, so that its parts are of one moment.

        Arguments:
            without_last: return the state before the last rollout, which is not trained and may be incomplete.
        """
        return self._before if without_last and self._before is not None else self._train_sampler.state()

    async def restore(self, cursor: dict[str, Any], states: PlaceStates) -> None:
        """Continue the data from ``cursor``, and the plugins from their states."""
        self._train_sampler.restore(cursor)
        self._train_sampler.hooks.restore(states)

    async def close(self) -> None:
        """Cancel groups in flight, and close connections."""
        await self._sampler.close()


class SamplerHandle:
    """The sampler as the loop calls it; every wait is watched.

    Arguments:
        actor: runs the sampler.
        wait: waits for calls under the run's limits.
        warn: receives warnings for people, such as samples that were lost.
        failures: receives the failures of observing plugins in the sampler.
        take_metrics: returns metrics of the driver to add to those of a rollout, such as restarts of engines.
    """

    def __init__(
        self,
        actor: Actor[SamplerActor],
        *,
        wait: Wait,
        warn: Callable[[str], None],
        failures: Failures,
        take_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._take_metrics = take_metrics
        self._actor = actor
        self._wait = wait
        self._warn = warn
        self._failures = failures
        self._is_interrupted = False

    def setup(self, settings: SamplerSettings) -> Call[None]:
        """Start loading; the caller waits."""
        return self._actor.start(SamplerActor.setup, settings)

    def sample(self, rollout: int) -> SampledShards:
        """Collect and pack rollout ``rollout``."""
        try:
            (result,) = self._wait([self._actor.start(SamplerActor.sample, rollout)], what=f"rollout {rollout}")
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        for warning in result.warnings:
            self._warn(f"rollout {rollout}: {warning}")
        self._failures.merge(result.failures)
        result.metrics.update(self._take_metrics())
        return result

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure every evaluation set with the weights that the engines hold."""
        call = self._actor.start(SamplerActor.evaluate, step)
        return self._wait([call], what=f"the evaluation after {step} steps")[0]

    def before_publish(self) -> None:
        """Do nothing: an evaluation has ended when :meth:`evaluate` returns."""

    def published(self, version: int) -> None:
        """Note that the engines serve ``version``; groups ahead of training may be admitted."""
        self._wait([self._actor.start(SamplerActor.published, version)], what="the sampler to continue")

    def state(self) -> SamplerCheckpoint:
        """Return the data cursor and the states of the sampler's plugins, before a rollout that was interrupted."""
        call = self._actor.start(SamplerActor.state, without_last=self._is_interrupted)
        return self._wait([call], what="the state of the sampler")[0]

    def restore(self, cursor: dict[str, Any], states: PlaceStates) -> None:
        """Continue the data from ``cursor``, and the plugins from their states."""
        self._wait([self._actor.start(SamplerActor.restore, cursor, states)], what="the data cursor")

    def close(self) -> None:
        """Let the sampler close its connections."""
        self._wait([self._actor.start(SamplerActor.close)], what="the sampler to close")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """An evaluation: the training steps before it, the version of its weights, and its call."""

    step: int
    version: int
    call: Call[dict[str, float]]


class ConcurrentEvalSampler:
    """A :class:`SamplerHandle` whose evaluations run while the learner trains, one at a time. Only the driver's thread
    uses it.

    Arguments:
        sampler: of the training prompts.
        actor: runs a sampler that only evaluates.
        config: if the policy's engines serve the evaluations (``eval_interleaved``), a publication waits for them, and
            so does the end of a rollout after which these engines release their devices.
        report: called with the number of steps before the evaluation, and its ``eval/...`` metrics.
        wait: waits for calls under the run's watch.
        monitors: calls whose failure ends any wait; includes the evaluation in flight, so that its failure ends the
            run at once.
        publish: sends the learner's weights to engines that only evaluate, as the version in its argument; None:
            evaluations measure the weights that the policy's engines serve.
    """

    def __init__(
        self,
        sampler: SamplerHandle,
        actor: Actor[SamplerActor],
        *,
        config: RunConfig,
        report: Callable[[int, Mapping[str, float]], None],
        wait: Wait,
        monitors: list[Call[object]],
        publish: Callable[[int], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._actor = actor
        self._on_policy_engines = config.eval.eval_interleaved
        self._shares_devices = config.eval.eval_interleaved and config.cluster.colocate
        self._report = report
        self._wait = wait
        self._monitors = monitors
        self._publish = publish
        self._served = 0  # version of the policy's engines
        self._in_flight: _InFlight | None = None
        self._waited_s = 0.0

    def sample(self, rollout: int) -> SampledShards:
        """Return the next rollout; ``perf/eval_waited_time`` has the seconds that the run waited for evaluations."""
        self._report_finished()
        sampled = self._sampler.sample(rollout)
        self._report_finished(waits=self._shares_devices)
        sampled.metrics["perf/eval_waited_time"], self._waited_s = self._waited_s, 0.0
        return sampled

    def evaluate(self, step: int) -> None:
        """Finish the previous evaluation, then start one of the weights after ``step`` steps.

        Raises:
            SlimeError: the previous evaluation failed, or the weights cannot be sent.
        """
        self._finish()
        if self._publish is not None:
            self._publish(step)
        call = self._actor.start(SamplerActor.evaluate, step)
        self._monitors.append(call)
        self._in_flight = _InFlight(step, self._served if self._publish is None else step, call)

    def before_publish(self) -> None:
        """Wait for an evaluation on the policy's engines, which are about to get new weights."""
        self._report_finished(waits=self._on_policy_engines)

    def published(self, version: int) -> None:
        """As :meth:`SamplerHandle.published`."""
        self._served = version
        self._sampler.published(version)

    def state(self) -> SamplerCheckpoint:
        """Return the sampler's part of a checkpoint, after the evaluation in flight has ended and is reported."""
        self._finish()
        return self._sampler.state()

    def close(self) -> None:
        """Wait for the last evaluation and report it, then close both samplers."""
        self._finish()
        self._wait([self._actor.start(SamplerActor.close)], what="the sampler of evaluations to close")
        self._sampler.close()

    def _report_finished(self, *, waits: bool = False) -> None:
        """Report the evaluation in flight if it has ended; with ``waits``, wait for its end."""
        if self._in_flight is not None and (waits or has_ended(self._in_flight.call)):
            self._finish()

    def _finish(self) -> None:
        """Wait for the evaluation in flight, if any, and report its scores.

        Raises:
            SlimeError: the evaluation failed.
        """
        evaluation = self._in_flight
        if evaluation is None:
            return
        started_s = time.monotonic()
        (scores,) = self._wait([evaluation.call], what=f"the evaluation after {evaluation.step} steps")
        self._waited_s += time.monotonic() - started_s
        self._monitors.remove(evaluation.call)
        self._in_flight = None
        self._report(evaluation.step, {**scores, "eval/weight_version": float(evaluation.version)})


AnySampler = SamplerHandle | ConcurrentEvalSampler


def eval_sampler_settings(settings: SamplerSettings, *, url: str, num_engines: int) -> SamplerSettings:
    """Return the settings of the sampler of evaluations.

    Arguments:
        settings: of a sampler that does not train and uses the policy's engines.
        url: of the engines that only evaluate; empty: there are none.
        num_engines: number of these engines.
    """
    log = settings.rewards_log
    settings = replace(settings, rewards_log=None if log is None else log.with_stem(f"{log.stem}-eval"))
    if not url:
        return settings
    # Engines that only evaluate do not return routes.
    learner = settings.config.learner.model_copy(update={"use_rollout_routing_replay": False})
    config = settings.config.model_copy(update={"learner": learner})
    return replace(settings, config=config, router_url=url, num_engines=num_engines, engine_urls=())
