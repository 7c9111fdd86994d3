"""The ranks of a critic apart as Ray actors, and the handle through which the learner's calls them all at once.

A rollout takes two calls: ``values`` before the actor's advantages are estimated, ``fit`` with the returns that come of
that. Tokens, values and returns travel from rank to rank through Ray's object store; the driver holds references.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime_core.cluster.actors import Call, uncollected
from slime_core.cluster.group import ActorGroup
from slime_core.learner.meeting import Meeting, numbered
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.manifest import Manifest, attach

__all__ = ["CriticActor", "CriticGroup"]

Wait = Callable[..., list[Any]]


class CriticActor(Meeting):
    """Runs a :class:`~slime_core.learner.critic.rank.CriticRank`, with exactly the driver's plugins."""

    def __init__(self, manifest: Manifest) -> None:
        # Here, because the options that setup() is handed are objects of the plugins' classes.
        self._registry = attach(manifest)
        self._critic: Any = None

    def setup(self, settings: LearnerSettings) -> None:
        """Build the critic and load its start weights. Collective."""
        with uncollected():
            from slime_core.learner.critic.rank import CriticRank  # with torch, which the driver does not need

            self._critic = CriticRank(settings, self._registry)

    def values(self, shards: list[Any]) -> list[Any]:
        """A reference to the values of this rank's share of ``shards``, which are references; or nothing."""
        found = self._critic.values(ray.get(shards))
        return [] if found is None else [ray.put(found)]

    def fit(self, returns: list[Any]) -> dict[str, float]:
        """Learn ``returns``: a reference a shard."""
        metrics: dict[str, float] = self._critic.fit(ray.get(returns))
        return metrics

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
    """All ranks of a critic apart.

    Arguments:
        group: actors that run :class:`CriticActor`, in rank order.
        settings: of any rank; rank, world size and address are filled in.
    """

    def __init__(self, group: ActorGroup, settings: LearnerSettings) -> None:
        self._group, self._settings = group, settings

    def setup(self, wait: Wait, *, reachable: bool) -> list[Call]:
        """Start building on every rank; the caller waits."""
        meeting = self._group[0].start("free_address", reachable=reachable)
        address = wait([meeting], what="an address for the critic's ranks")[0]
        return self._group.start_each("setup", numbered(self._settings, len(self._group), address))

    def values(self, shards: list[Any], wait: Wait) -> list[Any]:
        """References to the values of all samples of ``shards``."""
        found = wait(self._group.start("values", shards), what="the critic's values")
        return [ref for rank in found for ref in rank]

    def fit(self, returns: list[Any], wait: Wait) -> dict[str, float]:
        """The critic's metrics, once it has learnt ``returns``, a reference a shard."""
        metrics: dict[str, float] = wait(self._group.start("fit", returns), what="the critic to train")[0]
        return metrics

    def start(self, method: str, *arguments: Any) -> list[Call]:
        """Start ``save``, ``load`` or ``close`` on every rank."""
        return self._group.start(method, *arguments)
