"""The router with a watched life: when it dies, the run's waits end with its last lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray

from slime_core.cluster.actors import Actor, start_actor
from slime_core.rollout.engines.router import Router, RouterSettings, Worker
from slime_core.rollout.engines.server_actor import ServerActor

__all__ = ["RouterActor", "start_router"]


class RouterActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.router.Router`; when the actor dies, so does the router.

    Arguments:
        settings: of the router.
        reachable: listen on the node's own address, so that other nodes can reach it; otherwise on ``settings.host``.
    """

    def __init__(self, settings: RouterSettings, *, reachable: bool = False) -> None:
        host = ray.util.get_node_ip_address() if reachable else settings.host
        self._router = Router(replace(settings, host=host))
        super().__init__(self._router)

    def start(self) -> str:
        """The router answers at the URL that is returned; engines come with :meth:`add`.

        Raises:
            EngineError: it died or did not come up in time; the message ends with its last lines. Or it was stopped.
        """
        self._router.start()
        self._router.wait_ready()
        return self._router.url

    def add(self, workers: Sequence[str | Worker]) -> None:
        """The engines ``workers``, or at these addresses, get requests.

        Raises:
            EngineError: the router died, refused one, or did not take all in within ``start_timeout_s``.
        """
        self._router.add(*workers)


def start_router(settings: RouterSettings, *, reachable: bool = False) -> Actor:
    """Start an actor for the router and return at once; call ``start`` on it, then ``watch``."""
    return start_actor(RouterActor, settings, reachable=reachable, label="router")
