"""The training loop. Start here.

One step is a sentence: sample, train, save, publish, evaluate. Training borrows the devices and gives them back only
when its weights are published. Overlap of sampling and training is the sampler's business, which learns what the
engines serve; sharing of devices is the lending's: neither needs a second loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from slime_core.checkpoint.folder import RunState
from slime_core.config.schema import RunConfig
from slime_core.plugins.contracts import Place
from slime_core.plugins.lifecycle import LifecycleHooks, PlaceStates
from slime_core.runtime.actors import Ref
from slime_core.runtime.lending import Lending
from slime_core.track.track import Track
from slime_core.types import TrainBatch

__all__ = ["Learner", "Rollout", "Sampler", "SamplerState", "train"]


class Rollout(Protocol):
    """One sampled rollout, as the driver sees it."""

    @property
    def refs(self) -> list[Ref[TrainBatch]]:
        """References to one shard a data-parallel rank."""

    @property
    def metrics(self) -> dict[str, float]:
        """What its samples look like."""


class SamplerState(Protocol):
    """What a checkpoint holds of the sampler, all of one moment."""

    @property
    def cursor(self) -> dict[str, Any]:
        """Position in the data after the rollouts that were returned, without those generated ahead."""

    @property
    def plugin_states(self) -> PlaceStates:
        """What the plugins of the sampler want to find in a checkpoint."""


class Sampler(Protocol):
    """What the loop asks of the rollout side."""

    def sample(self, rollout: int) -> Rollout:
        """The next rollout; waits until it is there."""

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Scores of the weights that the engines hold; None: they are being measured, and the track hears of it."""

    def before_publish(self) -> None:
        """Nothing measures any more what the engines serve, so that it may change, when this returns."""

    def published(self, version: int) -> None:
        """The engines serve ``version``; what is generated ahead may go on."""

    def state(self) -> SamplerState:
        """What a checkpoint holds of the sampler."""


class Learner(Protocol):
    """What the loop asks of the training side."""

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """All optimizer steps of one rollout."""

    def publish(self, version: int) -> None:
        """Every engine holds the learner's weights, as ``version``, when this returns."""

    def save(self, state: RunState) -> None:
        """A checkpoint of ``state`` is on disk when this returns, with the states of the plugins on the ranks."""


def train(
    learner: Learner,
    sampler: Sampler,
    *,
    config: RunConfig,
    state: RunState,
    track: Track,
    devices: Lending,
    hooks: LifecycleHooks,
) -> RunState:
    """Run the steps that are left; returns where the run then stands. Engines never serve what the learner does not
    hold."""
    total = config.rollout.num_rollout
    with devices.lend("learner"):
        served = publish(learner, sampler, track, devices, hooks, version=state.step)
    if config.evaluates and not config.eval.skip_eval_before_train:
        evaluate(sampler, track, step=state.step, served=served)
    for step in range(state.step, total):
        with track.step(step) as metrics:
            with track.timer("rollout"):
                rollout = sampler.sample(step)
            metrics.update(rollout.metrics)
            with devices.lend("learner"):
                with track.timer("train"):
                    metrics.update(learner.train(rollout.refs))
                state = replace(state, step=step + 1)
                if is_due(config.checkpoint.save_interval, state.step) or state.step == total:
                    with track.timer("save"):
                        state = save(state, learner, sampler, hooks)
                if is_due(config.weights.update_weights_interval, state.step):
                    served = publish(learner, sampler, track, devices, hooks, version=state.step)
            metrics.update(hooks.failures.report(track.warn))
        if is_due(config.eval.eval_interval, state.step) or (config.eval.eval_interval and state.step == total):
            evaluate(sampler, track, step=state.step, served=served)
    return state


def save(state: RunState, learner: Learner, sampler: Sampler, hooks: LifecycleHooks) -> RunState:
    """Write a checkpoint, with where the data stands and what the plugins of every process want to find; returns it."""
    found = sampler.state()
    states: dict[str, Any] = {Place.DRIVER: hooks.states(), Place.SAMPLER: found.plugin_states}
    state = replace(state, cursor=found.cursor, plugin_states=states)
    learner.save(state)
    return state


def publish(
    learner: Learner, sampler: Sampler, track: Track, devices: Lending, hooks: LifecycleHooks, *, version: int
) -> int:
    """Hand the learner's weights to every engine; returns the version that the engines now serve."""
    with track.timer("update_weights"):
        sampler.before_publish()
        devices.make_room_for_weights()
        learner.publish(version)
        sampler.published(version)
    hooks.call("slime_after_weight_sync", version=version)
    return version


def evaluate(sampler: Sampler, track: Track, *, step: int, served: int) -> None:
    """Measure what the engines serve after ``step`` steps: weights of version ``served``, older if updates are rare.
    A concurrent evaluation only starts here."""
    with track.timer("eval"):
        scores = sampler.evaluate(step)
    if scores is not None:
        track.evaluation(step, {**scores, "eval/weight_version": float(served)})


def is_due(interval: int | None, count: int) -> bool:
    """Whether something that happens every ``interval`` steps happens after ``count`` steps; None and 0: never."""
    return bool(interval) and count % int(interval or 1) == 0
