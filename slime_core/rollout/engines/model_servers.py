"""The servers of one model: its engines and the router in front of them.

    engines   started by the run, external (:mod:`.external`), or both
    router    started by the run, external (:class:`~.router.RemoteRouter`), or none: then requests go to the only
    engine

Engines and router start in parallel. Engines are registered with the router once they answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime_core.rollout.engines.actors import EngineActor, RouterActor, ServerActor, start_engine, start_router
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.external import External, ExternalWatcher, start_watch
from slime_core.rollout.engines.router import RemoteRouter, RouterSettings, Worker
from slime_core.runtime.actors import Actor, ActorGroup, Call
from slime_core.runtime.placement import Slot
from slime_core.runtime.waiting import Wait
from slime_core.weights.engine_control import PauseMode

__all__ = ["ModelServers", "Supervision"]


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a run waits for its servers and hears of their death.

    Arguments:
        wait: waits for calls, under the run's limits.
        monitors: background calls whose failure ends any wait; each started server adds its own.
        reachable: whether other nodes have to reach the servers.
    """

    wait: Wait
    monitors: list[Call[object]]
    reachable: bool = False


class ModelServers:
    """Starts the servers of one model and knows their addresses.

    Arguments:
        name: for messages about waiting: ``"the engines"``.
        settings: one for each engine to start. Without any, and without ``others``, the model is not served.
        slots: one for each of these engines.
        watch: how to wait for them.
        router: settings of a router to start, or an external router; None: requests go to the engine directly.
        others: external engines.

    Attributes:
        engines: actors of the engines that were started here.
        starts: the pending calls that start them; each returns a URL.
        ranks: number of processes of each engine, in the order of :meth:`urls`.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        slots: Sequence[Slot],
        watch: Supervision,
        *,
        router: RouterSettings | RemoteRouter | None = None,
        others: Sequence[External] = (),
    ) -> None:
        self._name = name
        self._watch = watch
        self._settings = settings
        self._others = others
        self.ranks = (*(one.tensor_parallel for one in settings), *(one.ranks for one in others))
        self.engines = ActorGroup(
            tuple(
                start_engine(one, slot=slot, reachable=watch.reachable)
                for one, slot in zip(settings, slots, strict=True)
            )
        )
        self.starts = self.engines.start(EngineActor.start)
        self._remote = router if isinstance(router, RemoteRouter) else None
        self._router = start_router(router, reachable=watch.reachable) if isinstance(router, RouterSettings) else None
        self._router_starts = [self._router.start(RouterActor.start)] if self._router else []
        # A server that dies while the run waits for something else ends that wait.
        watch.monitors.extend([*self.starts, *self._router_starts])
        self._urls: list[str] = []
        self._url = ""
        self._is_registered = False

    # --- Addresses ---------------------------------------------------------------------------------------------------

    def urls(self) -> list[str]:
        """URL of each engine; waits until they have started."""
        if not self._urls:
            started = self._watch.wait(self.starts, what=f"{self._name} to start") if self.starts else []
            self._urls = [*started, *(one.url for one in self._others)]
        return self._urls

    def url(self) -> str:
        """Where requests go: the router, or the only engine. Waits for it to start. Empty: the model is not served."""
        if self._remote is not None:
            return self._remote.url
        if self._router is None:
            return "".join(self.urls()[:1])
        if not self._url:
            (self._url,) = self._watch.wait(self._router_starts, what="the router to start")
            self._watch_servers(self._router_starts, [self._router])
        return self._url

    def ready_url(self) -> str:
        """Where requests go; waits until the engines behind it answer them."""
        self.register()
        return self.url()

    def register(self) -> None:
        """Watch the engines that have started, and register them with the router; later calls do nothing.

        The router accepts only engines that are not paused, so colocated engines register before they pause.
        """
        if self._is_registered:
            return
        self._is_registered = True
        urls = self.urls()
        self._watch_servers(self.starts, self.engines)
        if self._others:
            self._watch.monitors.append(start_watch([one.url for one in self._others]).start(ExternalWatcher.watch))
        if self._remote is not None:
            self._remote.add(urls)
        if self._router is not None:
            added = self._router.start(RouterActor.add, self._workers())
            self._watch.wait([added], what="the router to see the engines")

    def _watch_servers(self, starts: Sequence[Call[str]], servers: Iterable[Actor[ServerActor]]) -> None:
        for start in starts:
            self._watch.monitors.remove(start)
        self._watch.monitors.extend(server.start(ServerActor.watch) for server in servers)

    def _workers(self) -> list[Worker]:
        ports = self._watch.wait(self.engines.start(EngineActor.bootstrap_port), what="the engines' bootstrap ports")
        kinds = [one.worker_type for one in self._settings]
        own = zip(self.urls()[: len(kinds)], kinds, ports, strict=True)
        return [
            *(Worker(*each) for each in own),
            *(Worker(one.url, one.worker_type, one.bootstrap_port) for one in self._others),
        ]

    # --- Control -----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        self._watch.wait(self.engines.start(EngineActor.pause, mode), what="the engines to pause")

    def resume(self) -> None:
        """Generate again."""
        self._watch.wait(self.engines.start(EngineActor.resume), what="the engines to resume")

    def release_memory(self, *tags: str) -> None:
        """Free the device memory of ``tags``: ``weights``, ``kv_cache``."""
        calls = self.engines.start(EngineActor.release_memory, *tags)
        self._watch.wait(calls, what=f"the engines to free {' and '.join(tags)}")

    def resume_memory(self, *tags: str) -> None:
        """Allocate the memory of ``tags`` again."""
        calls = self.engines.start(EngineActor.resume_memory, *tags)
        self._watch.wait(calls, what=f"the engines to allocate {' and '.join(tags)}")

    def deregister(self) -> None:
        """Remove the run's engines from an external router.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        if self._remote is not None:
            self._remote.deregister()

    def begin_stop(self) -> list[Call[None]]:
        """Begin to stop every server that the run started; external ones keep running."""
        actors: list[Actor[ServerActor]] = [*self.engines, *([self._router] if self._router else [])]
        return [actor.start(ServerActor.stop) for actor in actors]
