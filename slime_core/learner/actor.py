"""The ranks of the learner and of a separate critic as Ray actors.

    LearnerActor, CriticActor   one rank each
    RankResult                  what a rank of the learner returns for a rollout

A separate critic trains a rollout in two calls: ``values`` before the actor's advantages are estimated, ``fit`` with
the returns that the estimator computed. Tokens, values and returns travel from rank to rank through Ray's object store;
the driver holds references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray.exceptions import RayError

from slime_core.checkpoint.folder import RunState
from slime_core.learner import LearnerSettings
from slime_core.learner.background_save import SaveSettings, complete, export_weights
from slime_core.learner.critic_reshard import TokenValues, values_of_shard
from slime_core.learner.rank_load import RankLoad
from slime_core.plugins.lifecycle import PlaceStates
from slime_core.plugins.manifest import Manifest, attach
from slime_core.runtime.actors import Ref, Watched, background, local_error, session_folder, uncollected
from slime_core.track.failures import Failures
from slime_core.types import TrainBatch
from slime_core.weights import PublisherSettings
from slime_core.weights.engine_control import reserve_port

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy, WrittenPart
    from slime_core.learner.critic import CriticRank
    from slime_core.learner.rank import LearnerRank
    from slime_core.weights.publisher import Publisher


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
            reachable: whether other nodes have to reach it; if not, it is on loopback.
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
        written = [state.write() for state in copies]
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
    """Runs a :class:`~slime_core.learner.rank.LearnerRank`."""

    _learner: LearnerRank  # once setup() has returned

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._publishers: dict[bool, Publisher] = {}  # True: to the engines that only evaluate

    def setup(self, settings: LearnerSettings) -> None:
        """Build the model and load the start weights. Collective."""
        self._host = settings.address.rpartition(":")[0]  # of the first rank, which serves the stores
        with uncollected():
            from slime_core.learner.rank import LearnerRank  # with torch, which the driver does not need

            self._learner = LearnerRank(settings, self._registry)

    def kernels(self) -> dict[str, str]:
        """Return the implementations that this rank uses, see :class:`~slime_core.learner.rank.LearnerRank`."""
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
            values: references to the values of a separate critic, of all shards; empty without one.
            number: of the shard among all.
        """
        learner, shard = self._learner, ray.get(shards[0])
        values_U = values_of_shard(ray.get(list(values)), shard, number=number) if values else None
        metrics = learner.train(shard, values_U) | learner.speed(shard)
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
            for name, weight in learner.saved_weights() if saving.save_hf else ():
                if learner.is_sender:  # other ranks only take part in gathering the weight
                    weights.append((name, weight.detach().to("cpu", copy=True)))
            self._export = None
            if learner.is_sender:
                self._export = partial(export_weights, draft, weights, saving.hf_template, learner.write_hf)

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


def wait_for_parts(ranks: Sequence[Ref[list[WrittenPart]]]) -> list[WrittenPart]:
    """Wait until every rank has written its part of a checkpoint, and return the parts.

    Arguments:
        ranks: references to the results of the ranks, one per rank.

    Raises:
        SlimeError: a rank failed.
    """
    ray.wait(list(ranks), num_returns=len(ranks))  # all ranks, even if one fails: the others still write into the draft
    try:
        return [part for rank in ray.get(list(ranks)) for part in rank]
    except RayError as error:
        raise local_error(error, who="a rank that wrote its part of a checkpoint") from error
