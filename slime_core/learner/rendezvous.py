"""The address where the ranks of a process group meet, and the settings of each rank."""

from __future__ import annotations

from dataclasses import replace

import ray

from slime_core.learner.settings import LearnerSettings
from slime_core.runtime.actors import Watched
from slime_core.weights.update_group import reserve_port

__all__ = ["Rendezvous", "settings_of_ranks"]


class Rendezvous(Watched):
    """Base of the actors that form a process group; any of them can offer the address."""

    def free_address(self, *, reachable: bool) -> str:
        """A ``host:port`` of this node, reserved for this process until it serves the ranks' store there.

        Arguments:
            reachable: other nodes have to reach it; otherwise it is on loopback.
        """
        host = ray.util.get_node_ip_address() if reachable else "127.0.0.1"
        return f"{host}:{reserve_port(host)}"


def settings_of_ranks(settings: LearnerSettings, count: int, address: str) -> list[LearnerSettings]:
    """The settings of each of ``count`` ranks that meet at ``address``."""
    return [replace(settings, rank=rank, world_size=count, address=address) for rank in range(count)]
