"""The ranks of the learner and of a separate critic as Ray actors, and the handle through which the driver calls them.

    LearnerActor, CriticActor   one rank each
    LearnerHandle               all ranks, as the loop calls them
    BackgroundSave              waits for the checkpoint that ranks are writing

With a separate critic a rollout takes two calls of its ranks: ``values`` before the actor's advantages are estimated,
``fit`` with the returns that the estimator computed. Tokens, values and returns travel from rank to rank through Ray's
object store; the driver holds references.

Ranks write a checkpoint while they train: together they copy their state, and each writes its copy in a background
thread, so training waits only for the copy. When the files of all ranks are on disk, the draft folder is renamed to the
checkpoint, and the checkpoints that it replaces are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError

from slime_core.checkpoint.folder import (
    Checkpoint,
    Retention,
    RunState,
    by_step,
    draft_of,
    drafted,
    remove_drafts,
    write_state,
    writing,
)
from slime_core.config.model_config import CARRIED
from slime_core.contracts import Place
from slime_core.errors import CheckpointError, SlimeError, WeightSyncError
from slime_core.learner import LearnerSettings
from slime_core.learner.critic_reshard import TokenValues, values_of_shard
from slime_core.learner.rank_load import RankLoad, load_metrics
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.lifecycle import PlaceStates
from slime_core.plugins.manifest import Manifest, attach
from slime_core.runtime.actors import (
    ActorGroup,
    Call,
    Ref,
    Watched,
    background,
    local_error,
    session_folder,
    uncollected,
)
from slime_core.runtime.waiting import Wait, has_ended, wait
from slime_core.track.failures import Failures
from slime_core.types import TrainBatch
from slime_core.weights import PublisherSettings
from slime_core.weights.engine_control import reserve_port

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy, WrittenPart
    from slime_core.learner.critic import CriticRank
    from slime_core.learner.critic_reshard import TokenValues
    from slime_core.learner.rank import Learner
    from slime_core.weights.publisher import Publisher


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """The folder of checkpoints and their contents.

    Arguments:
        folder: of all checkpoints of the run.
        hf_template: Hugging Face folder whose config and tokenizer a Hugging Face export is completed with.
        save_hf: also export the weights as a Hugging Face folder.
        retention: which checkpoints stay.
    """

    folder: Path
    hf_template: Path
    save_hf: bool = True
    retention: Retention = field(default_factory=Retention)


class RankActor(Watched):
    """One rank of a process group, with exactly the driver's plugins."""

    def __init__(self, manifest: Manifest) -> None:
        # Before setup(), whose settings hold options objects of the plugins' classes.
        self._registry = attach(manifest)
        self._copies: Sequence[StateCopy] = ()  # of the rank's state, for a checkpoint
        self._export: Callable[[], None] | None = None  # writes the copied weights in Hugging Face's format

    def free_address(self, *, reachable: bool) -> str:
        """Reserve a ``host:port`` of this node until this process serves the ranks' store there, and return it.

        Arguments:
            reachable: other nodes have to reach it; False: it is on loopback.
        """
        host = ray.util.get_node_ip_address() if reachable else "127.0.0.1"
        return f"{host}:{reserve_port(host)}"

    def setup(self, settings: LearnerSettings) -> None:
        """Build the model and load the start weights. Collective."""
        raise NotImplementedError

    @background
    def write(self) -> list[WrittenPart]:
        """Write the copies of this rank, and release them; other methods run meanwhile."""
        copies, self._copies = self._copies, ()
        export, self._export = self._export, None
        written = [one.write() for one in copies]
        if export is not None:
            export()
        return written


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of one rank after training a rollout.

    Arguments:
        metrics: the same on every rank.
        failures: of the plugins' observers on the rank.
        load: time and memory of the rank in the rollout.
        returns: a reference to the targets of a separate critic, from the rank that reports its shard.
    """

    metrics: dict[str, float]
    failures: Failures
    load: RankLoad
    returns: tuple[Ref[np.ndarray], ...] = ()


class LearnerActor(RankActor):
    """Runs a :class:`~slime_core.learner.rank.Learner`."""

    _learner: Learner  # once setup() has returned

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._publishers: dict[bool, Publisher] = {}  # True: to the engines that only evaluate

    def setup(self, settings: LearnerSettings) -> None:
        """Build the model and load the start weights. Collective."""
        self._host = settings.address.rpartition(":")[0]  # of the first rank, which serves the stores
        with uncollected():
            from slime_core.learner.rank import Learner  # with torch, which the driver does not need

            self._learner = Learner(settings, self._registry)

    def kernels(self) -> dict[str, str]:
        """Return the implementations that this rank uses, see :class:`~slime_core.learner.rank.Learner`."""
        return self._learner.kernels

    def connect(self, engine_urls: list[str], settings: PublisherSettings, *, only_evaluate: bool = False) -> None:
        """Connect to the engines for weight transfer; may be repeated, as after a restart of an engine. Collective."""
        from slime_core.weights.publisher import Publisher
        from slime_core.weights.transports import start_helper

        learner = self._learner
        if only_evaluate in self._publishers:
            self._publishers.pop(only_evaluate).close()
        if settings.transport == "tensor" and (folder := session_folder()) is not None:
            start_helper(folder)
        has_observers = settings.transport == "disk" and learner.hooks.implementers("slime_after_weight_write")
        self._publishers[only_evaluate] = Publisher(
            engine_urls,
            settings=replace(settings, address=self._host),
            weights=learner.export_weights(),
            sends=learner.is_sender,
            on_written=partial(self._on_written, engine_urls) if has_observers else None,
        )

    def _on_written(self, engine_urls: list[str], folder: Path | None) -> None:
        self._learner.hooks.call("slime_after_weight_write", folder=folder, engine_urls=engine_urls)

    def train(
        self, shards: list[Ref[TrainBatch]], values: Sequence[Ref[TokenValues]] = (), *, number: int = 0
    ) -> RankResult:
        """Train this rank's shard, a reference in a list of one.

        Arguments:
            values: references to the values of a separate critic, of all shards; empty: there is none.
            number: of the shard among all.
        """
        learner, shard = self._learner, ray.get(shards[0])
        known = values_of_shard(ray.get(list(values)), shard, number=number) if values else None
        metrics = learner.train(shard, known) | learner.speed(shard)
        failures, returns_U = learner.hooks.failures.take(), learner.returns_U
        load = learner.measure_load(shard)
        from slime_core.learner.critic import reports_shard

        if not values or returns_U is None or not reports_shard():
            return RankResult(metrics, failures, load)
        return RankResult(metrics, failures, load, (ray.put(returns_U.cpu().numpy()),))

    def publish(self, version: int) -> float:
        """Send the weights to every engine, as ``version``. Collective; see ``Publisher.publish``."""
        learner = self._learner
        with learner.timeline.span("publish", version - 1 if version else None):
            proven = self._publishers[False].publish(learner.export_weights(), version=str(version))
        learner.published(version)
        return proven

    def publish_for_evaluation(self, version: int) -> None:
        """Send the weights to every engine that only evaluates, as ``version``. Collective."""
        self._publishers[True].publish(self._learner.export_weights(), version=str(version))

    def check_equal(self, version: int) -> None:
        """Erase the engines' weights and send ``version`` again. Collective; see ``Publisher.check_equal``."""
        self._publishers[False].check_equal(self._learner.export_weights(), version=str(version))

    def copy(self, draft: Path, saving: SaveSettings) -> None:
        """Copy this rank's part of a checkpoint, which :meth:`write` then writes into ``draft``. Collective."""
        learner = self._learner
        with learner.timeline.span("save", None):
            self._copies = learner.copy(draft)
            weights = []
            for name, weight in learner.export_weights() if saving.save_hf else ():
                if learner.is_sender:  # other ranks only take part in gathering the weight
                    weights.append((name, weight.detach().to("cpu", copy=True)))
            self._export = partial(_export, draft, weights, saving.hf_template) if learner.is_sender else None

    @background
    def complete(self, written: Sequence[Ref[list[WrittenPart]]], state: RunState, saving: SaveSettings) -> None:
        """Make a checkpoint of the parts that all ranks write; see :func:`complete`."""
        complete(partial(wait_for_parts, written), state, saving)

    def plugin_states(self) -> PlaceStates:
        """Return the plugins' states on this rank, for a checkpoint."""
        return self._learner.hooks.states()

    def load(self, folder: Path, states: PlaceStates) -> None:
        """Continue from the checkpoint in ``folder`` and the plugins' states. Collective."""
        learner = self._learner
        learner.load(folder)
        learner.hooks.restore(states)

    def offload(self, *, keeps_weights: bool = False) -> int:
        """Move all device memory, or all but the actor's weights, to the host; return its bytes."""
        return self._learner.offload(keeps_weights=keeps_weights)

    def onload(self) -> None:
        """Move everything back to the device."""
        self._learner.onload()

    def close(self) -> None:
        """Leave every process group."""
        for publisher in self._publishers.values():
            publisher.close()
        self._learner.close()


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
        critic: the ranks of a separate critic; empty: the critic is on the learner's ranks, or there is none.
        has_engines: False: the run only trains, so weights are not published and parity is never due.
        restarts: of failed engines; None: the failure of an engine ends the run.
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
            own = replace(settings, layout=ParallelLayout.of(settings.config.critic_parallel))
            calls += self._setup(self.critic, own, of="critic", reachable=reachable)
        return calls

    def _setup(
        self, group: ActorGroup[RankActor], settings: LearnerSettings, *, of: str, reachable: bool
    ) -> list[Call[None]]:
        call = group[0].start(RankActor.free_address, reachable=reachable)
        address = self.wait([call], what=f"an address for the {of}'s ranks")[0]
        own = [replace(settings, rank=rank, world_size=len(group), address=address) for rank in range(len(group))]
        return group.start_each(RankActor.setup, own)

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
        found = self.wait(self.critic.start(CriticActor.values, shards), what="the critic's values")
        values = [ref for rank in found for ref in rank]
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
        """Warn once if the first rollout whose parity was due could not be compared; None: it was not due."""
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
                f"{1 - proven:.0%} of the engines' weights cannot be compared with what was sent, because the engines "
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
        self._saved.begin(first.start(LearnerActor.complete, [one.ref for one in writes], state, saving), state.step)

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
    """Replaces :class:`LearnerHandle` where the run only generates: engines keep their start weights."""

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """Ignore the shards; return no metrics."""
        return {}

    def publish(self, version: int) -> None:
        """Do nothing: the engines hold the start weights."""

    def publish_again(self) -> None:
        """Do nothing: restarted engines hold the start weights, too."""

    def save(self, state: RunState) -> None:
        """Do nothing: there are no weights to save."""

    def wait_for_save(self, *, required: bool = False) -> None:
        """Return at once: no checkpoint is being written."""

    def wait_for_save_after_failure(self) -> None:
        """Return at once: no checkpoint is being written."""

    def close(self) -> None:
        """Do nothing: no rank was started."""


def _export(draft: Path, weights: list[tuple[str, Any]], template: Path) -> None:
    """Copy the model's config and tokenizer into ``draft``, and write ``weights``, if any, as a Hugging Face folder."""
    from slime_core.weights import hugging_face as hf

    with writing(carried := draft / "torch_dist" / CARRIED):
        carried.mkdir()
        hf.copy_small_files(template, carried)
    if weights:
        with writing(draft / "hf"):
            hf.write(draft / "hf", weights, template=template)


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
            mean: ``parity/mean``, in nats; None: parity was not compared.
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


class CriticActor(RankActor):
    """Runs a :class:`~slime_core.learner.critic.CriticRank`."""

    _critic: CriticRank  # once setup() has returned

    def setup(self, settings: LearnerSettings) -> None:
        """Build the critic and load its start weights. Collective."""
        with uncollected():
            from slime_core.learner.critic import CriticRank  # with torch, which the driver does not need

            self._critic = CriticRank(settings, self._registry)

    def values(self, shards: list[Ref[TrainBatch]]) -> list[Ref[TokenValues]]:
        """Compute the values of this rank's share of ``shards``, which are references.

        Returns:
            A reference to the values; an empty list on ranks that do not report their share.
        """
        values = self._critic.values(ray.get(shards))
        return [] if values is None else [ray.put(values)]

    def fit(self, returns: list[Ref[np.ndarray]]) -> dict[str, float]:
        """Train on ``returns``, one reference per shard; return the critic's metrics."""
        return self._critic.fit(ray.get(returns))

    def copy(self, folder: Path) -> None:
        """Copy this rank's part of a checkpoint, which :meth:`write` then writes into ``folder``. Collective."""
        self._copies = [self._critic.critic.copy(folder)]

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in ``folder``. Collective."""
        self._critic.critic.load(folder)

    def close(self) -> None:
        """Leave the process group."""
        self._critic.close()


def complete(write: Callable[[], Sequence[WrittenPart]], state: RunState, saving: SaveSettings) -> None:
    """Make a checkpoint of the draft of ``state``, and remove the checkpoints that it replaces.

    Arguments:
        write: returns the parts of all ranks, once they are on disk.

    Raises:
        CheckpointError: a part could not be written; the draft is removed.
    """
    from slime_core.checkpoint import sharded

    with drafted(saving.folder, state.step) as draft:
        sharded.finish(write())
        saving.retention.mark(draft, state.step)
        with writing(draft / "state.json"):
            write_state(draft, state)
    saving.retention.tidy(saving.folder, newest=state.step)


def wait_for_parts(ranks: Sequence[Ref[list[WrittenPart]]]) -> list[WrittenPart]:
    """Wait until every rank has written its part of a checkpoint, and return the parts.

    Arguments:
        ranks: references to the results of the ranks, one per rank.

    Raises:
        SlimeError: a rank failed.
    """
    ray.wait(list(ranks), num_returns=len(ranks))  # also where a rank fails: other ranks still write into the draft
    try:
        return [part for rank in ray.get(list(ranks)) for part in rank]
    except RayError as error:
        raise local_error(error, who="a rank that wrote its part of a checkpoint") from error


class BackgroundSave:
    """Waits for the checkpoint that ranks are writing; at most one is being written.

    Arguments:
        folder: of all checkpoints of the run.
        wait: waits for calls under the run's limits.
        warn: receives the failure of a save that does not end the run.
    """

    def __init__(self, folder: Path, *, wait: Wait, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._wait = wait
        self._warn = warn
        self._call: Call[None] | None = None
        self._step = 0

    def begin(self, call: Call[None], step: int) -> None:
        """Record ``call``, which completes the checkpoint of ``step``. No other checkpoint may be in progress."""
        assert self._call is None
        self._call, self._step = call, step

    def look(self) -> None:
        """Report a save that has failed; do not wait for one that is running."""
        if self._call is not None and has_ended(self._call):
            self.join()

    def join(self, *, required: bool = False) -> None:
        """Wait for the checkpoint that is being written.

        Arguments:
            required: the run ends with this checkpoint, so a failure to write it is an error, not a warning.

        Raises:
            CheckpointError: a required checkpoint could not be written.
        """
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._wait([call], what=f"the checkpoint of step {self._step}")
        except CheckpointError as error:
            kept = f"{max(by_step(self._folder).values())} is kept" if by_step(self._folder) else "there is none"
            if required:
                raise CheckpointError(
                    f"step {self._step}, the last of this run, is not saved: {error}; {kept}. Free space on that disk, "
                    "then resume with --load."
                ) from error
            self._warn(
                f"step {self._step} is not saved: {error}. The run goes on and tries again at the next save; until "
                f"then {kept}. Free space on that disk."
            )

    def join_after_failure(self) -> None:
        """Wait for the checkpoint although the run fails, at most as long as the run's limits allow; ignore errors."""
        call, self._call = self._call, None
        if call is not None:
            with suppress(SlimeError):
                wait([call], what=f"the checkpoint of step {self._step}", on_warn=self._warn)
