"""Where the ranks of a process group find each other."""

from __future__ import annotations

from dataclasses import replace

import ray

from slime_core.learner.settings import LearnerSettings
from slime_core.runtime.actors import Watched
from slime_core.weights.group import reserve

__all__ = ["Meeting", "numbered"]


class Meeting(Watched):
    """Base of the actors that form a process group: any of them can say where."""

    def free_address(self, *, reachable: bool) -> str:
        """A ``host:port`` of this node for the ranks to meet, held for this process until it serves their store.

        Arguments:
            reachable: other nodes have to reach it; otherwise it is on loopback.
        """
        host = ray.util.get_node_ip_address() if reachable else "127.0.0.1"
        return f"{host}:{reserve(host)}"


def numbered(settings: LearnerSettings, count: int, address: str) -> list[LearnerSettings]:
    """The settings of each of ``count`` ranks that meet at ``address``."""
    return [replace(settings, rank=rank, world_size=count, address=address) for rank in range(count)]
