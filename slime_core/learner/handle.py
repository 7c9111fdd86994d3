"""All ranks of the learner, as the driver calls them.

LearnerHandle   starts, trains, publishes and saves on every rank; NoLearner replaces it in runs that only generate
ParityDrift     warns if the difference between learner and engines grows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Protocol

import numpy as np

from slime_core.checkpoint.folder import Checkpoint, RunState, draft_of, remove_drafts
from slime_core.contracts import Place
from slime_core.errors import WeightSyncError
from slime_core.learner import LearnerSettings
from slime_core.learner.actor import CriticActor, LearnerActor, RankActor, RankResult
from slime_core.learner.background_save import BackgroundSave, SaveSettings
from slime_core.learner.rank_load import load_metrics
from slime_core.modeling.layout import ParallelLayout
from slime_core.runtime.actors import ActorGroup, Call, Ref
from slime_core.runtime.waiting import Wait
from slime_core.track.failures import Failures
from slime_core.types import TrainBatch
from slime_core.weights import PublisherSettings

NOTICE_S = 10.0
"""Seconds to wait after a failed publication for the notice that an engine has failed."""


class EngineRestarts(Protocol):
    """The restarts of failed engines, as a publication uses them."""

    def settle(self, *, within_s: float = 0.0) -> bool:
        """Wait until every engine is up, and up to ``within_s`` for a failure to be noticed.

        Returns:
            Whether an engine needs weights.
        """

    def served(self) -> None:
        """Record that every engine holds the learner's weights."""


@dataclass(slots=True, eq=False)
class LearnerHandle:
    """All ranks as the loop calls them. Every wait has a name and a limit.

    Arguments:
        group: its ranks, in their order.
        wait: waits for calls under the run's limits.
        saving: where checkpoints go.
        data_ranks: which data-parallel shard each rank trains; ranks that share one copy of the model share a shard.
        warn: receives warnings for the user.
        failures: receives the failures of plugins' observers on any rank.
        checks_equal: after the first publication, check that it reaches every weight of the engines.
        ahead: rollouts that are generated ahead of training, for a warning.
        critic: the ranks of a separate critic; empty if the critic is on the learner's ranks, or there is none.
        has_engines: False if the run only trains: weights are not published, and parity is never due.
        restarts: of failed engines; None if the failure of an engine ends the run.
    """

    group: ActorGroup[LearnerActor]
    _: KW_ONLY
    wait: Wait
    saving: SaveSettings
    data_ranks: Sequence[int]
    warn: Callable[[str], None]
    failures: Failures
    checks_equal: bool = False
    ahead: int = 0
    critic: ActorGroup[CriticActor] = field(default_factory=lambda: ActorGroup(()))
    has_engines: bool = True
    restarts: EngineRestarts | None = None
    _engines: tuple[list[str], PublisherSettings] | None = field(default=None, init=False)  # once connect() returned
    _version: int = field(default=0, init=False)  # of the weights that the ranks hold
    _saved: BackgroundSave = field(init=False)
    _warned_of_names: bool = field(default=False, init=False)
    _parity_was_due: bool = field(default=False, init=False)
    _parity_drift: ParityDrift = field(default_factory=lambda: ParityDrift(), init=False)

    def __post_init__(self) -> None:
        self._saved = BackgroundSave(self.saving.folder, wait=self.wait, warn=self.warn)

    def setup(self, settings: LearnerSettings, *, reachable: bool) -> list[Call[None]]:
        """Start building the model on every rank; the caller waits for the calls.

        Arguments:
            settings: of any rank; rank, world size and address are filled in.
            reachable: the ranks, or the engines, are on several nodes.
        """
        calls = self._setup(self.group, settings, of="learner", reachable=reachable)
        if len(self.critic):
            critic_settings = replace(settings, layout=ParallelLayout.of(settings.config.critic_parallel))
            calls += self._setup(self.critic, critic_settings, of="critic", reachable=reachable)
        return calls

    def _setup(
        self, group: ActorGroup[RankActor], settings: LearnerSettings, *, of: str, reachable: bool
    ) -> list[Call[None]]:
        call = group[0].start(RankActor.free_address, reachable=reachable)
        address = self.wait([call], what=f"an address for the {of}'s ranks")[0]
        world = replace(settings, world_size=len(group), address=address)
        return group.start_each(RankActor.setup, [replace(world, rank=rank) for rank in range(len(group))])

    def kernels(self) -> dict[str, str]:
        """Return part of the model -> the implementation that the ranks use, in words; all ranks use the same."""
        return self.wait([self.group[0].start(LearnerActor.kernels)], what="the learner's kernels")[0]

    def connect(self, engine_urls: list[str], settings: PublisherSettings, *, only_evaluate: bool = False) -> None:
        """Connect every rank to the engines for weight transfer.

        Arguments:
            only_evaluate: the engines are those of :meth:`publish_for_evaluation`.
        """
        calls = self.group.start(LearnerActor.connect, engine_urls, settings, only_evaluate=only_evaluate)
        self.wait(calls, what=f"learner and engines{' that only evaluate' if only_evaluate else ''} to meet")
        if not only_evaluate:
            self._engines = engine_urls, settings

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """Run all optimizer steps of one rollout, and return its metrics.

        Arguments:
            shards: references, one per data-parallel rank.
        """
        self._saved.look()
        results = self.wait(self.critic.start(CriticActor.values, shards), what="the critic's values")
        values = [ref for rank in results for ref in rank]
        calls = [
            actor.start(LearnerActor.train, [shards[number]], values, number=number)
            for actor, number in zip(self.group, self.data_ranks, strict=True)
        ]
        trained = self.wait(calls, what="training")
        self._version += 1
        for rank in trained:
            self.failures.merge(rank.failures)
        metrics = trained[0].metrics | load_metrics([rank.load for rank in trained])
        if len(self.critic):
            fits = self.critic.start(CriticActor.fit, self._returns(trained))
            metrics |= self.wait(fits, what="the critic to train")[0]
        self._warn_of_unchecked_parity(metrics.get("parity/tokens"))
        if (message := self._parity_drift.warning(metrics.get("parity/mean"))) is not None:
            self.warn(message)
        return metrics

    def _returns(self, trained: Sequence[RankResult]) -> list[Ref[np.ndarray]]:
        """Return a reference to the critic's targets of each shard, in the order of the shards."""
        reported = sorted(
            (number, ref) for number, rank in zip(self.data_ranks, trained, strict=True) for ref in rank.returns
        )
        return [ref for _, ref in reported]

    def _warn_of_unchecked_parity(self, tokens: float | None) -> None:
        """Warn once if the first rollout whose parity was due could not be compared.

        Arguments:
            tokens: number of compared tokens; None if parity was not due.
        """
        if tokens == 0 and not self._parity_was_due:
            self.warn(parity_unchecked_warning(self.ahead))
        self._parity_was_due = self._parity_was_due or tokens is not None

    def publish(self, version: int) -> None:
        """Send the learner's weights to every engine, as ``version``, and wait until the engines hold them."""
        if not self.has_engines:
            return
        self._version = version
        if self.restarts is None:
            self._publish(version)
            return
        needs_connection = self.restarts.settle()
        while True:
            try:
                if needs_connection and self._engines is not None:
                    self.connect(*self._engines)
                self._publish(version)
                break
            except WeightSyncError:
                needs_connection = self.restarts.settle(within_s=NOTICE_S)
                if not needs_connection:  # no engine failed
                    raise
        self.restarts.served()

    def publish_again(self) -> None:
        """Send the weights that the ranks hold to every engine, restarted engines included."""
        self.publish(self._version)

    def _publish(self, version: int) -> None:
        what = f"weights of version {version} to reach the engines"
        proven = self.wait(self.group.start(LearnerActor.publish, version), what=what)[0]
        if proven < 1 and not self._warned_of_names:
            self._warned_of_names = True
            self.warn(
                f"{1 - proven:.0%} of the engines' weights cannot be compared with the sent weights, because engines "
                "hold them under other names or in another form; that all engines agree with each other was checked"
            )
        if self.checks_equal:
            self.checks_equal = False
            calls = self.group.start(LearnerActor.check_equal, version)
            self.wait(calls, what="spoiled engines to get all weights back")

    def publish_for_evaluation(self, version: int) -> None:
        """Send the learner's weights to every engine that only evaluates, as ``version``, and wait for it."""
        calls = self.group.start(LearnerActor.publish_for_evaluation, version)
        self.wait(calls, what=f"weights of version {version} to reach the engines that only evaluate")

    def offload(self, *, keeps_weights: bool = False) -> None:
        """Move the device memory of every rank, or all but the actor's weights, to the host."""
        what = "the learner to free memory for publishing" if keeps_weights else "the learner to leave the devices"
        self.wait(self.group.start(LearnerActor.offload, keeps_weights=keeps_weights), what=what)

    def onload(self) -> None:
        """Move everything back to the device of every rank."""
        self.wait(self.group.start(LearnerActor.onload), what="the learner to return to the devices")

    def save(self, state: RunState) -> None:
        """Start a checkpoint of ``state``: wait until every rank has copied its part, which it then writes.

        An earlier checkpoint is completed first. Plugins' states are those of rank 0.
        """
        saving, first = self.saving, self.group[0]
        self._saved.join()
        call = first.start(LearnerActor.plugin_states)
        states = self.wait([call], what="the plugins' states on the learner")[0]
        state = replace(state, plugin_states={**state.plugin_states, Place.RANK: states})
        remove_drafts(saving.folder)
        draft = draft_of(saving.folder, state.step)
        calls = self.group.start(LearnerActor.copy, draft, saving)
        calls += self.critic.start(CriticActor.copy, draft)
        self.wait(calls, what=f"a copy of step {state.step}")
        writes = self.group.start(RankActor.write) + self.critic.start(RankActor.write)
        self._saved.begin(first.start(LearnerActor.complete, [call.ref for call in writes], state, saving), state.step)

    def wait_for_save(self, *, required: bool = False) -> None:
        """Wait for the checkpoint that is being written; see :meth:`BackgroundSave.join`."""
        self._saved.join(required=required)

    def wait_for_save_after_failure(self) -> None:
        """Wait for the checkpoint in a run that ends with another failure."""
        self._saved.join_after_failure()

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``."""
        states = checkpoint.state.plugin_states.get(Place.RANK, {})
        calls = self.critic.start(CriticActor.load, checkpoint.path)
        calls += self.group.start(LearnerActor.load, checkpoint.path, states)
        self.wait(calls, what=f"the checkpoint {checkpoint.path.name}")

    def close(self) -> None:
        """Let every rank leave its process groups."""
        calls = self.group.start(LearnerActor.close) + self.critic.start(CriticActor.close)
        self.wait(calls, what="the learner to close")


class NoLearner:
    """Replaces :class:`LearnerHandle` if the run only generates: engines keep their start weights."""

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """Ignore the shards; return no metrics."""
        return {}

    def publish(self, version: int) -> None:
        """Do nothing: the engines hold the start weights."""

    def publish_again(self) -> None:
        """Do nothing: restarted engines hold the start weights."""

    def save(self, state: RunState) -> None:
        """Do nothing: there are no weights to save."""

    def wait_for_save(self, *, required: bool = False) -> None:
        """Return at once: no checkpoint is being written."""

    def wait_for_save_after_failure(self) -> None:
        """Return at once: no checkpoint is being written."""

    def close(self) -> None:
        """Do nothing: no rank was started."""


def parity_unchecked_warning(ahead: int) -> str:
    """Return the warning for a run that generates ``ahead`` rollouts ahead and could compare no token."""
    older = (
        f"--async-buffer-size {ahead} generates ahead, so that tokens may be older than the weights they are trained "
        "with: a short run with --async-buffer-size 0 checks the same engines. "
    )
    return (
        "parity of learner and engines could not be checked: no trained token of this rollout is known to come from "
        f"the published weights alone. {older if ahead else ''}A generate function must copy weight_versions from the "
        "engine's answers to its samples. --parity-interval 0 switches the check off"
    )


DRIFT = 3.0
"""Growth of ``parity/mean`` that is no noise: a rollout has thousands of tokens."""
ROUNDING = 1e-5
"""Difference in nats that float32 alone explains; its growth means nothing."""


class ParityDrift:
    """Warns once if ``parity/mean`` has tripled since its first value, as it does when a weight is never updated."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._has_warned = False

    def warning(self, mean: float | None) -> str | None:
        """Return the warning after a rollout, if there is one.

        Arguments:
            mean: ``parity/mean``, in nats; None if parity was not compared.
        """
        if mean is None or self._has_warned:
            return None
        if self._first is None:
            self._first = mean
        self._has_warned = mean > DRIFT * max(self._first, ROUNDING)
        if not self._has_warned:
            return None
        return (
            f"parity/mean was {self._first:.3g} at first and is {mean:.3g} now: learner and engines drift apart, as "
            "they do if a weight does not reach the engines. To test that, continue the run with "
            "--check-weight-update-equal"
        )
