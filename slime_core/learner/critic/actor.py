"""The ranks of a separate critic as Ray actors, and the handle through which the learner's handle calls them.

A rollout takes two calls: ``values`` before the actor's advantages are estimated, ``fit`` with the returns that the
estimator computed. Tokens, values and returns travel from rank to rank through Ray's object store; the driver holds
references.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray

from slime_core.learner.rendezvous import Rendezvous, settings_of_ranks
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.manifest import Manifest, attach
from slime_core.runtime.actors import ActorGroup, Call, Ref, uncollected
from slime_core.runtime.waiting import Wait
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.learner.critic.rank import CriticRank
    from slime_core.learner.critic.reshard import TokenValues

__all__ = ["CriticActor", "CriticGroup"]


class CriticActor(Rendezvous):
    """Runs a :class:`~slime_core.learner.critic.rank.CriticRank`, with exactly the driver's plugins."""

    _critic: CriticRank  # once setup() has returned

    def __init__(self, manifest: Manifest) -> None:
        # Before setup(), whose settings hold options objects of the plugins' classes.
        self._registry = attach(manifest)

    def setup(self, settings: LearnerSettings) -> None:
        """Build the critic and load its start weights. Collective."""
        with uncollected():
            from slime_core.learner.critic.rank import CriticRank  # with torch, which the driver does not need

            self._critic = CriticRank(settings, self._registry)

    def values(self, shards: list[Ref[TrainBatch]]) -> list[Ref[TokenValues]]:
        """A reference to the values of this rank's share of ``shards``, which are references; or nothing."""
        found = self._critic.values(ray.get(shards))
        return [] if found is None else [ray.put(found)]

    def fit(self, returns: list[Ref[np.ndarray]]) -> dict[str, float]:
        """Train on ``returns``, a reference a shard; returns the critic's metrics."""
        return self._critic.fit(ray.get(returns))

    def save(self, folder: Path) -> None:
        """Write this rank's part of the checkpoint in ``folder``. Collective."""
        self._critic.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in ``folder``. Collective."""
        self._critic.critic.load(folder)

    def close(self) -> None:
        """Leave the process group."""
        self._critic.close()


class CriticGroup:
    """All ranks of a separate critic.

    Arguments:
        group: its ranks, in their order.
        settings: of any rank; rank, world size and address are filled in.
    """

    def __init__(self, group: ActorGroup[CriticActor], settings: LearnerSettings) -> None:
        self._group = group
        self._settings = settings

    def setup(self, wait: Wait, *, reachable: bool) -> list[Call[None]]:
        """Start building on every rank; the caller waits."""
        call = self._group[0].start(CriticActor.free_address, reachable=reachable)
        address = wait([call], what="an address for the critic's ranks")[0]
        return self._group.start_each(CriticActor.setup, settings_of_ranks(self._settings, len(self._group), address))

    def values(self, shards: list[Ref[TrainBatch]], wait: Wait) -> list[Ref[TokenValues]]:
        """References to the values of all samples of ``shards``."""
        found = wait(self._group.start(CriticActor.values, shards), what="the critic's values")
        return [ref for rank in found for ref in rank]

    def fit(self, returns: list[Ref[np.ndarray]], wait: Wait) -> dict[str, float]:
        """Train on ``returns``, a reference a shard; returns the critic's metrics."""
        return wait(self._group.start(CriticActor.fit, returns), what="the critic to train")[0]

    def save(self, folder: Path) -> list[Call[None]]:
        """Start to write the critic's part of the checkpoint in ``folder``; the caller waits."""
        return self._group.start(CriticActor.save, folder)

    def load(self, folder: Path) -> list[Call[None]]:
        """Start to continue from the checkpoint in ``folder``; the caller waits."""
        return self._group.start(CriticActor.load, folder)

    def close(self) -> list[Call[None]]:
        """Start to leave the process group on every rank; the caller waits."""
        return self._group.start(CriticActor.close)
