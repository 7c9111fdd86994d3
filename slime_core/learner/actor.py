"""The learner's ranks as Ray actors, and the handle through which the driver calls them all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from slime_core.checkpoint.folder import Checkpoint, RunState, drafted, write_state
from slime_core.learner.critic.actor import CriticGroup
from slime_core.learner.critic.recut import Column, put_together
from slime_core.learner.meeting import Meeting, numbered
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.contracts import Place
from slime_core.plugins.lifecycle import Failures, PlaceStates
from slime_core.plugins.manifest import Manifest, attach
from slime_core.runtime.actors import Call, Ref, uncollected
from slime_core.runtime.group import ActorGroup
from slime_core.runtime.waiting import Wait
from slime_core.types import TrainBatch
from slime_core.weights.publisher import Publisher, PublisherSettings

if TYPE_CHECKING:
    from slime_core.learner.rank import Learner

__all__ = ["LearnerActor", "LearnerHandle", "Saving", "Trained", "unchecked"]

UNCHECKED = (
    "parity of learner and engines could not be checked: no trained token of this rollout is known to come from the "
    "published weights alone. {older}A generate function must copy weight_versions from the engine's answers to its "
    "samples. --parity-interval 0 switches the check off"
)
OLDER = (
    "--async-buffer-size {ahead} generates ahead, so that tokens may be older than the weights they are trained with: "
    "a short run with --async-buffer-size 0 checks the same engines. "
)


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go and what they hold.

    Arguments:
        folder: of all checkpoints of the run.
        hf_template: Hugging Face folder whose config and tokenizer a Hugging Face export is completed with.
        save_hf: also export the weights as a Hugging Face folder.
    """

    folder: Path
    hf_template: Path
    save_hf: bool = True


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank says of a rollout that it trained.

    Arguments:
        metrics: the same on every rank.
        failures: what watching plugins got wrong there.
        returns: a reference to what a critic apart is to learn of the rank's shard, from the one that speaks for it.
    """

    metrics: dict[str, float]
    failures: Failures
    returns: tuple[Ref[np.ndarray], ...] = ()


class LearnerActor(Meeting):
    """Runs a :class:`~slime_core.learner.rank.Learner`, with exactly the driver's plugins."""

    _learner: Learner  # once setup() has returned
    _publisher: Publisher  # once connect() has returned
    _eval_publisher: Publisher  # once connect_evaluation() has returned

    def __init__(self, manifest: Manifest) -> None:
        # Here, because the options that setup() is handed are objects of the plugins' classes.
        self._registry = attach(manifest)
        self._publishers: list[Publisher] = []

    def setup(self, settings: LearnerSettings) -> None:
        """Build the model and load the start weights. Collective."""
        with uncollected():
            from slime_core.learner.rank import Learner  # with torch, which the driver does not need

            self._learner = Learner(settings, self._registry)

    def connect(self, engine_urls: list[str], settings: PublisherSettings) -> None:
        """Meet the engines for weight transfer. Collective."""
        self._publisher = self._publishes_to(engine_urls, settings)

    def connect_evaluation(self, engine_urls: list[str], settings: PublisherSettings) -> None:
        """Meet the engines that only evaluate. Collective."""
        self._eval_publisher = self._publishes_to(engine_urls, settings)

    def _publishes_to(self, engine_urls: list[str], settings: PublisherSettings) -> Publisher:
        learner = self._learner
        watched = settings.transport == "disk" and learner.hooks.implementers("slime_after_weight_write")
        publisher = Publisher(
            engine_urls,
            settings=settings,
            weights=learner.export_weights(),
            sends=learner.is_sender,
            written=partial(self._written, engine_urls) if watched else None,
        )
        self._publishers.append(publisher)
        return publisher

    def _written(self, engine_urls: list[str], folder: Path | None) -> None:
        self._learner.hooks.call("slime_after_weight_write", folder=folder, engine_urls=engine_urls)

    def train(self, shards: list[Ref[TrainBatch]], values: Sequence[Ref[Column]] = (), *, number: int = 0) -> Trained:
        """Train this rank's shard, a reference in a list of one.

        Arguments:
            values: references to the values of a critic apart, of all shards; empty: there is none.
            number: which of the shards it is.
        """
        learner, shard = self._learner, ray.get(shards[0])
        if not values:
            return Trained(learner.train(shard), learner.hooks.failures.take())
        from slime_core.learner.critic.rank import speaks_for_shard

        metrics = learner.train(shard, put_together(ray.get(list(values)), shard, number=number))
        failures, returns_U = learner.hooks.failures.take(), learner.returns_U
        if returns_U is None or not speaks_for_shard():
            return Trained(metrics, failures)
        return Trained(metrics, failures, (ray.put(returns_U.cpu().numpy()),))

    def publish(self, version: int) -> float:
        """Every engine holds the weights of the learner, as ``version``. Collective; see ``Publisher.publish``."""
        proven = self._publisher.publish(self._learner.export_weights(), version=str(version))
        self._learner.published(version)
        return proven

    def publish_for_evaluation(self, version: int) -> None:
        """Every engine that only evaluates holds the weights of the learner, as ``version``. Collective."""
        self._eval_publisher.publish(self._learner.export_weights(), version=str(version))

    def check_equal(self, version: int) -> None:
        """The engines lose all weights and get ``version`` again. Collective; see ``Publisher.check_equal``."""
        self._publisher.check_equal(self._learner.export_weights(), version=str(version))

    def save(self, draft: Path, *, export: bool, template: Path) -> None:
        """Write this rank's part of a checkpoint. Collective."""
        from slime_core.weights import export as hf

        learner = self._learner
        learner.save(draft)
        if export:
            hf.write(draft / "hf", learner.export_weights(), template=template, writes=learner.is_sender)

    def plugin_states(self) -> PlaceStates:
        """What the plugins of this rank want to find in a checkpoint."""
        return self._learner.hooks.states()

    def load(self, folder: Path, states: PlaceStates) -> None:
        """Continue from the checkpoint in ``folder`` and the plugins' states. Collective."""
        learner = self._learner
        learner.load(folder)
        learner.hooks.restore(states)

    def sleep(self) -> int:
        """Give all device memory away; returns its bytes."""
        return self._learner.sleep()

    def wake(self) -> None:
        """Take the device memory back."""
        self._learner.wake()

    def close(self) -> None:
        """Leave every process group."""
        for publisher in self._publishers:
            publisher.close()
        self._learner.close()


class LearnerHandle:
    """All ranks as the loop calls them; every wait is watched.

    Arguments:
        group: its ranks, in their order.
        wait: waits for calls under the run's limits.
        saving: where checkpoints go.
        data_ranks: which data-parallel shard each rank trains; ranks that share one copy of the model share a shard.
        checks_equal: after the first publication, prove that it reaches every weight of the engines.
        ahead: rollouts that are generated ahead of training, for the words of a warning.
        warn: receives what a person should read.
        failures: receives what watching plugins got wrong on any rank.
        critic: a critic apart; None: it shares the ranks, or there is none.
    """

    def __init__(
        self,
        group: ActorGroup[LearnerActor],
        *,
        wait: Wait,
        saving: Saving,
        data_ranks: Sequence[int],
        checks_equal: bool = False,
        ahead: int = 0,
        warn: Callable[[str], None],
        failures: Failures,
        critic: CriticGroup | None = None,
    ) -> None:
        self._failures, self._critic = failures, critic
        self._group, self._wait, self._saving = group, wait, saving
        self._warned, self._parity_seen, self._checks_equal = False, False, checks_equal
        self._data_ranks, self._warn = list(data_ranks), warn
        self._ahead = ahead

    def setup(self, settings: LearnerSettings, *, reachable: bool) -> list[Call[None]]:
        """Start building on every rank; the caller waits.

        Arguments:
            settings: of any rank; rank, world size and address are filled in.
            reachable: the ranks, or the engines, are on several nodes.
        """
        meeting = self._group[0].start(LearnerActor.free_address, reachable=reachable)
        address = self._wait([meeting], what="an address for the learner's ranks")[0]
        critic = [] if self._critic is None else self._critic.setup(self._wait, reachable=reachable)
        return self._group.start_each(LearnerActor.setup, numbered(settings, len(self._group), address)) + critic

    def connect(self, engine_urls: list[str], settings: PublisherSettings) -> None:
        """Meet the engines for weight transfer."""
        calls = self._group.start(LearnerActor.connect, engine_urls, settings)
        self._wait(calls, what="learner and engines to meet")

    def connect_evaluation(self, engine_urls: list[str], settings: PublisherSettings) -> None:
        """Meet the engines that only evaluate."""
        calls = self._group.start(LearnerActor.connect_evaluation, engine_urls, settings)
        self._wait(calls, what="learner and engines that only evaluate to meet")

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """All optimizer steps of one rollout; ``shards`` are references, one a data-parallel rank."""
        values = [] if self._critic is None else self._critic.values(shards, self._wait)
        calls = [
            actor.start(LearnerActor.train, [shards[number]], values, number=number)
            for actor, number in zip(self._group, self._data_ranks, strict=True)
        ]
        trained = self._wait(calls, what="training")
        for rank in trained:
            self._failures.merge(rank.failures)
        metrics = trained[0].metrics
        if self._critic is not None:
            metrics |= self._critic.fit(self._returns(trained), self._wait)
        self._watch_parity(metrics.get("parity/tokens"))
        return metrics

    def _returns(self, trained: Sequence[Trained]) -> list[Ref[np.ndarray]]:
        """A reference a shard, in their order."""
        spoken = sorted(
            (number, ref) for number, rank in zip(self._data_ranks, trained, strict=True) for ref in rank.returns
        )
        return [ref for _, ref in spoken]

    def _watch_parity(self, tokens: float | None) -> None:
        """Warn once if the first rollout whose parity was due could not be compared; None: it was not due."""
        if tokens == 0 and not self._parity_seen:
            self._warn(unchecked(self._ahead))
        self._parity_seen = self._parity_seen or tokens is not None

    def publish(self, version: int) -> None:
        """Every engine holds the learner's weights, as ``version``, when this returns."""
        what = f"weights of version {version} to reach the engines"
        proven = self._wait(self._group.start(LearnerActor.publish, version), what=what)[0]
        if proven < 1 and not self._warned:
            self._warned = True
            self._warn(
                f"{1 - proven:.0%} of the engines' weights have names that cannot be compared with what was sent; "
                "that all engines agree with each other was checked"
            )
        if self._checks_equal:
            self._checks_equal = False
            calls = self._group.start(LearnerActor.check_equal, version)
            self._wait(calls, what="spoiled engines to get all weights back")

    def publish_for_evaluation(self, version: int) -> None:
        """Every engine that only evaluates holds the learner's weights, as ``version``, when this returns."""
        calls = self._group.start(LearnerActor.publish_for_evaluation, version)
        self._wait(calls, what=f"weights of version {version} to reach the engines that only evaluate")

    def sleep(self) -> None:
        """No rank holds anything on its device when this returns."""
        self._wait(self._group.start(LearnerActor.sleep), what="the learner to leave the devices")

    def wake(self) -> None:
        """Every rank holds on its device what it held before when this returns."""
        self._wait(self._group.start(LearnerActor.wake), what="the learner to return to the devices")

    def save(self, state: RunState) -> None:
        """A checkpoint of ``state`` is on disk when this returns, or nothing of it; of the plugins on the ranks, rank 0
        is asked for their states."""
        saving = self._saving
        asked = self._group[0].start(LearnerActor.plugin_states)
        states = self._wait([asked], what="the plugins' states on the learner")[0]
        with drafted(saving.folder, state.step) as draft:
            (draft / "torch_dist").mkdir()
            calls = self._group.start(LearnerActor.save, draft, export=saving.save_hf, template=saving.hf_template)
            calls += [] if self._critic is None else self._critic.save(draft)
            self._wait(calls, what=f"the checkpoint of step {state.step}")
            write_state(draft, replace(state, plugin_states={**state.plugin_states, Place.RANK: states}))

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``."""
        states = checkpoint.state.plugin_states.get(Place.RANK, {})
        calls = [] if self._critic is None else self._critic.load(checkpoint.path)
        calls += self._group.start(LearnerActor.load, checkpoint.path, states)
        self._wait(calls, what=f"the checkpoint {checkpoint.path.name}")

    def close(self) -> None:
        """Let every rank leave its process groups."""
        calls = self._group.start(LearnerActor.close)
        calls += [] if self._critic is None else self._critic.close()
        self._wait(calls, what="the learner to close")


def unchecked(ahead: int) -> str:
    """What to say where no token could be compared in a run that generates ``ahead`` rollouts ahead."""
    return UNCHECKED.format(older=OLDER.format(ahead=ahead) if ahead else "")


def manifest_record(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON-ready values, for checkpoints."""
    record: dict[str, Any] = json.loads(manifest.to_json())
    return record
