"""The training loop. Start here.

One step is a sentence: sample, train, save, publish, evaluate. The learner holds the devices while it trains, until its
weights are published. The sampler overlaps sampling and training on its own, and the device pool moves memory where
learner and engines share devices: neither needs a second loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from slime_core.checkpoint.folder import RunState, SaveClock, is_due
from slime_core.config.schema import RunConfig
from slime_core.contracts import Place
from slime_core.errors import SlimeError
from slime_core.plugins.lifecycle import Hooks, PlaceStates
from slime_core.runtime.actors import Ref
from slime_core.runtime.device_pool import DevicePool
from slime_core.runtime.waiting import Termination
from slime_core.track.track import Track
from slime_core.types import TrainBatch


class Rollout(Protocol):
    """One sampled rollout, as the driver sees it."""

    @property
    def refs(self) -> list[Ref[TrainBatch]]:
        """References to one shard a data-parallel rank."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the rollout's samples."""


class SamplerState(Protocol):
    """The sampler's part of a checkpoint, all of one moment."""

    @property
    def cursor(self) -> dict[str, Any]:
        """Position in the data after the rollouts that were returned; rollouts generated ahead do not count."""

    @property
    def plugin_states(self) -> PlaceStates:
        """States of the sampler's plugins."""


class Sampler(Protocol):
    """The rollout side, as the loop calls it."""

    def sample(self, rollout: int) -> Rollout:
        """The next rollout; waits until it is complete."""

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Scores of the weights that the engines hold; None: a concurrent evaluation has started and reports them."""

    def before_publish(self) -> None:
        """Wait for a concurrent evaluation, whose weights must not change."""

    def published(self, version: int) -> None:
        """The engines serve ``version``; generation ahead of training may resume."""

    def state(self) -> SamplerState:
        """The sampler's part of a checkpoint."""


class Learner(Protocol):
    """The training side, as the loop calls it."""

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """All optimizer steps of one rollout."""

    def publish(self, version: int) -> None:
        """Every engine holds the learner's weights, as ``version``, when this returns."""

    def save(self, state: RunState) -> None:
        """``state``, the weights and the states of the plugins on the ranks are copied when this returns, to be written
        while training goes on."""

    def wait_for_save(self, *, required: bool = False) -> None:
        """The checkpoint that was being written is on disk when this returns, or a warning says that it is not.

        Arguments:
            required: an error says so.
        """

    def wait_for_save_after_failure(self) -> None:
        """The same, where the run ends with another failure, which hides that of the save."""


def train(
    learner: Learner,
    sampler: Sampler,
    *,
    config: RunConfig,
    state: RunState,
    track: Track,
    devices: DevicePool,
    hooks: Hooks,
    stop: Termination,
) -> RunState:
    """Run the remaining steps; returns the state after them. Engines serve only weights that the learner holds, and a
    SIGTERM (``stop``) ends only what can be done again: a wait for the sampler, unless the rollout keeps groups."""
    saves = SaveClock(config)
    with devices.held_by("learner"):
        served = publish(learner, sampler, track, devices, hooks, version=state.step)
    if config.eval.eval_interval and not config.eval.skip_eval_before_train:
        evaluate(sampler, track, step=state.step, served=served, stop=stop)
    for step in range(state.step, saves.total):
        with track.step(step) as metrics, completing_save_after_failure(learner):
            with track.timer("rollout"), stop.allowed(not config.rollout.has_groups_across_rollouts):
                rollout = sampler.sample(step)
            metrics.update(rollout.metrics)
            with devices.held_by("learner"):
                with track.timer("train"):
                    metrics.update(learner.train(rollout.refs))
                state = replace(state, step=step + 1, row={})
                if saves.is_due(state.step):
                    with track.timer("save"):
                        state = save(replace(state, row=dict(metrics)), learner, sampler, hooks, saves=saves)
                if is_due(config.weights.update_weights_interval, state.step):
                    served = publish(learner, sampler, track, devices, hooks, version=state.step)
            metrics.update(hooks.failures.report(track.warn))
        if is_due(config.eval.eval_interval, state.step) or (config.eval.eval_interval and state.step == saves.total):
            evaluate(sampler, track, step=state.step, served=served, stop=stop)
    return state


@contextmanager
def completing_save_after_failure(learner: Learner) -> Iterator[None]:
    """Where the block fails, the checkpoint that is being written has the time to become complete: a step that it
    contains keeps its row of metrics only if it does."""
    try:
        yield
    except SlimeError:
        learner.wait_for_save_after_failure()
        raise


def save(
    state: RunState,
    learner: Learner,
    sampler: Sampler,
    hooks: Hooks,
    *,
    saves: SaveClock | None = None,
    devices: DevicePool | None = None,
) -> RunState:
    """Start a checkpoint with the position in the data and the states of plugins; returns the state that it holds.

    Arguments:
        saves: of the loop; the last checkpoint of a run is on disk when this returns, and without ``async_save`` every
            one. None: the caller waits for it.
        devices: to give to the learner, once the sampler's part is known; None: it holds them.
    """
    found = sampler.state()
    states: dict[str, Any] = {Place.DRIVER: hooks.states(), Place.SAMPLER: found.plugin_states}
    state = replace(state, cursor=found.cursor, plugin_states=states)
    with nullcontext() if devices is None else devices.held_by("learner"):
        learner.save(state)
    if saves is not None and saves.waits_after(state.step):
        learner.wait_for_save(required=state.step == saves.total)
    return state


def publish(
    learner: Learner, sampler: Sampler, track: Track, devices: DevicePool, hooks: Hooks, *, version: int
) -> int:
    """Send the learner's weights to every engine; returns the version that the engines now serve."""
    with track.timer("update_weights"):
        sampler.before_publish()
        devices.make_room_for_weights()
        learner.publish(version)
        sampler.published(version)
    hooks.call("slime_after_weight_sync", version=version)
    return version


def evaluate(sampler: Sampler, track: Track, *, step: int, served: int, stop: Termination) -> None:
    """Evaluate the engines after ``step`` steps; they serve version ``served``, which is older if updates are rare.
    A concurrent evaluation only starts here."""
    with track.timer("eval"), stop.allowed():
        scores = sampler.evaluate(step)
    if scores is not None:
        track.evaluation(step, {**scores, "eval/weight_version": float(served)})
