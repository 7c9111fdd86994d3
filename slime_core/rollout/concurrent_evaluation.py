"""Evaluations that run while the learner trains: a separate sampler uses separate engines, or those of the policy.

    Evaluations    one at a time; what one finds is reported when it has ended
    ConcurrentEvalSampler  the sampler as the loop calls it, whose evaluations are made there

The rule: the weights that an evaluation measures stay as they are until it has ended. Engines of its own get the
learner's when it starts. The policy's engines get new ones, or leave devices that they share with the learner, when it
has ended. A checkpoint is written when it has ended, so that a run that resumes there neither lacks its row nor has it
twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.plugins.lifecycle import PlaceStates
from slime_core.rollout.actor import SampledShards, SamplerActor, SamplerHandle
from slime_core.rollout.sampler import SamplerState
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.runtime.actors import Actor, Call
from slime_core.runtime.waiting import Wait, has_ended

__all__ = ["ConcurrentEvalSampler", "ConcurrentEvaluations", "eval_sampler_settings"]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """One evaluation: after how many steps, of which weights, and the call that makes it."""

    step: int
    version: int
    call: Call[dict[str, float]]


class ConcurrentEvaluations:
    """Starts an evaluation, and ends it before the next one; used by the driver's thread alone.

    Arguments:
        actor: runs a :class:`~slime_core.rollout.actor.SamplerActor` that does not train.
        report: called with the number of steps before the evaluation, and its ``eval/...`` metrics.
        wait: waits for calls under the run's watch.
        monitors: calls whose failure ends any wait; the one that is under way is among them, so that an evaluation that
            fails ends the run at once.
        publish: hands the learner's weights to engines that only evaluate, as the version that it is called with; None:
            evaluations measure what the policy's engines serve.
    """

    def __init__(
        self,
        actor: Actor[SamplerActor],
        *,
        report: Callable[[int, Mapping[str, float]], None],
        wait: Wait,
        monitors: list[Call[object]],
        publish: Callable[[int], None] | None = None,
    ) -> None:
        self._actor = actor
        self._report = report
        self._wait = wait
        self._monitors = monitors
        self._publish = publish
        self._under_way: _UnderWay | None = None
        self._waited_s = 0.0

    def start(self, step: int, *, served: int) -> None:
        """Finish the previous evaluation, then start one.

        Arguments:
            step: steps done, which is also the version of the learner's weights.
            served: version that the policy's engines serve.

        Raises:
            SlimeError: the previous evaluation failed, or the weights cannot be sent.
        """
        self.finish()
        if self._publish is not None:
            self._publish(step)
        call = self._actor.start(SamplerActor.evaluate, step)
        self._monitors.append(call)
        self._under_way = _UnderWay(step, served if self._publish is None else step, call)

    def look(self) -> None:
        """Report the evaluation that is under way if it has ended; waits for nothing."""
        if self._under_way is not None and has_ended(self._under_way.call):
            self.finish()

    def finish(self) -> None:
        """None is under way when this returns, and what it found is reported.

        Raises:
            SlimeError: what ended it.
        """
        one = self._under_way
        if one is None:
            return
        begun_s = time.monotonic()
        (scores,) = self._wait([one.call], what=f"the evaluation after {one.step} steps")
        self._waited_s += time.monotonic() - begun_s
        self._monitors.remove(one.call)
        self._under_way = None
        self._report(one.step, {**scores, "eval/weight_version": float(one.version)})

    def take_waited_s(self) -> float:
        """Seconds that the run waited for evaluations since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        """The last one has ended, and its sampler has closed its connections."""
        self.finish()
        self._wait([self._actor.start(SamplerActor.close)], what="the sampler of evaluations to close")


class ConcurrentEvalSampler:
    """A :class:`~slime_core.rollout.actor.SamplerHandle` whose evaluations run while the learner trains.

    Arguments:
        sampler: of the training prompts.
        evaluations: see there.
        on_policy_engines: they are answered by the policy's engines, which wait for them before they change weights.
        shares_devices: these engines leave their devices after each rollout, and wait before they do.
    """

    def __init__(
        self,
        sampler: SamplerHandle,
        evaluations: ConcurrentEvaluations,
        *,
        on_policy_engines: bool,
        shares_devices: bool,
    ) -> None:
        self._sampler = sampler
        self._evaluations = evaluations
        self._on_policy_engines = on_policy_engines
        self._shares_devices = shares_devices
        self._served = 0

    @staticmethod
    def of(config: RunConfig, sampler: SamplerHandle, evaluations: ConcurrentEvaluations) -> ConcurrentEvalSampler:
        """As the settings of a run say."""
        interleaved = config.eval.eval_interleaved
        return ConcurrentEvalSampler(
            sampler,
            evaluations,
            on_policy_engines=interleaved,
            shares_devices=interleaved and config.cluster.colocate,
        )

    def sample(self, rollout: int) -> SampledShards:
        """The next rollout; ``perf/eval_waited_time`` says what waiting for evaluations has cost since the last."""
        self._evaluations.look()
        sampled = self._sampler.sample(rollout)
        self._let_go(self._shares_devices)
        sampled.metrics["perf/eval_waited_time"] = self._evaluations.take_waited_s()
        return sampled

    def evaluate(self, step: int) -> None:
        """Start to measure what is served after ``step`` steps."""
        self._evaluations.start(step, served=self._served)

    def before_publish(self) -> None:
        """The policy's engines are measured no more."""
        self._let_go(self._on_policy_engines)

    def published(self, version: int) -> None:
        """See :class:`~slime_core.rollout.actor.SamplerHandle`."""
        self._served = version
        self._sampler.published(version)

    def state(self) -> SamplerState:
        """What a checkpoint holds of the sampler; what was measured before it is reported."""
        self._evaluations.finish()
        return self._sampler.state()

    def restore(self, cursor: dict[str, Any], states: PlaceStates) -> None:
        """See :class:`~slime_core.rollout.actor.SamplerHandle`."""
        self._sampler.restore(cursor, states)

    def close(self) -> None:
        """The last evaluation is reported, and both samplers have closed their connections."""
        self._evaluations.close()
        self._sampler.close()

    def _let_go(self, must_end: bool) -> None:
        if must_end:
            self._evaluations.finish()
        else:
            self._evaluations.look()


def eval_sampler_settings(settings: SamplerSettings, *, url: str, num_engines: int) -> SamplerSettings:
    """The settings of the sampler of evaluations.

    Arguments:
        settings: of a sampler that does not train, and asks the policy's engines.
        url: where engines that only evaluate answer; empty: there are none.
        num_engines: how many.
    """
    log = settings.rewards_log
    settings = replace(settings, rewards_log=None if log is None else log.with_stem(f"{log.stem}-eval"))
    if not url:
        return settings
    # Only what is trained has its routes replayed, and engines that only evaluate do not return them.
    learner = settings.config.learner.model_copy(update={"use_rollout_routing_replay": False})
    config = settings.config.model_copy(update={"learner": learner})
    return replace(settings, config=config, router_url=url, num_engines=num_engines, engine_urls=())
