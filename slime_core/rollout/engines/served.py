"""One model that is served: its engines, and the router before them.

    engines   started here, by somebody else (:mod:`.external`), or both kinds
    router    started here, by somebody else (:mod:`.remote_router`), or none: then its only engine is asked directly

Engines and router start side by side. The router takes the engines in when they answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime_core.rollout.engines.actors import EngineActor, RouterActor, ServerActor, start_engine, start_router
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.external import External
from slime_core.rollout.engines.external_watch import ExternalWatcher, start_watch
from slime_core.rollout.engines.remote_router import RemoteRouter
from slime_core.rollout.engines.router import RouterSettings, Worker
from slime_core.runtime.actors import Actor, Call
from slime_core.runtime.group import ActorGroup
from slime_core.runtime.placement import Slot
from slime_core.runtime.waiting import Wait
from slime_core.weights.endpoints import PauseMode

__all__ = ["Served", "Watch"]


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run waits for what it has started.

    Arguments:
        wait: waits for calls, under the run's limits.
        monitors: background calls whose failure ends any wait; what is started adds its own.
        reachable: whether servers have to be reached from other nodes.
    """

    wait: Wait
    monitors: list[Call[object]]
    reachable: bool = False


class Served:
    """Starts the servers of one model, and says where they answer.

    Arguments:
        name: as it reads in a wait: ``"the engines"``.
        settings: of each engine to start; none, and no ``others``: nothing is served.
        slots: of these engines.
        watch: see there.
        router: of a router to start, or one that somebody else has started; None: there is none.
        others: engines that somebody else has started.

    Attributes:
        engines: actors of the engines that were started here.
        starts: their starts, each of which ends with a URL.
        ranks: processes of each engine, in the order of :meth:`urls`.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        slots: Sequence[Slot],
        watch: Watch,
        *,
        router: RouterSettings | RemoteRouter | None = None,
        others: Sequence[External] = (),
    ) -> None:
        self._name, self._watch, self._settings, self._others = name, watch, settings, others
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
        # One that dies while something else is waited for is heard at once.
        watch.monitors.extend([*self.starts, *self._router_starts])
        self._urls: list[str] = []
        self._url = ""
        self._is_in = False

    # --- Addresses ---------------------------------------------------------------------------------------------------

    def urls(self) -> list[str]:
        """Of each engine; they have started, or been found, when this returns."""
        if not self._urls:
            started = self._watch.wait(self.starts, what=f"{self._name} to start") if self.starts else []
            self._urls = [*started, *(one.url for one in self._others)]
        return self._urls

    def url(self) -> str:
        """Where requests go; waits for the router alone, if there is one. Empty: nothing is served."""
        if self._remote is not None:
            return self._remote.url
        if self._router is None:
            return "".join(self.urls()[:1])
        if not self._url:
            (self._url,) = self._watch.wait(self._router_starts, what="the router to start")
            self._now_watched(self._router_starts, [self._router])
        return self._url

    def answering_url(self) -> str:
        """Where requests go, all of which are answered when this returns."""
        self.take_in()
        return self.url()

    def take_in(self) -> None:
        """Engines that have started are watched, and the router sends them requests. It takes in only those that are
        not paused, so shared devices are left after this. Does it once."""
        if self._is_in:
            return
        self._is_in = True
        urls = self.urls()
        self._now_watched(self.starts, self.engines)
        if self._others:
            self._watch.monitors.append(start_watch([one.url for one in self._others]).start(ExternalWatcher.watch))
        if self._remote is not None:
            self._remote.add(urls)
        if self._router is not None:
            added = self._router.start(RouterActor.add, self._workers())
            self._watch.wait([added], what="the router to see the engines")

    def _now_watched(self, starts: Sequence[Call[str]], servers: Iterable[Actor[ServerActor]]) -> None:
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

    # --- For whoever shares devices with the engines, or ends them ---------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """They generate nothing from here on."""
        self._watch.wait(self.engines.start(EngineActor.pause, mode), what="the engines to pause")

    def resume(self) -> None:
        """They generate again."""
        self._watch.wait(self.engines.start(EngineActor.resume), what="the engines to go on")

    def release_memory(self, *tags: str) -> None:
        """They have given the memory of ``tags`` away."""
        calls = self.engines.start(EngineActor.release_memory, *tags)
        self._watch.wait(calls, what=f"the engines to give {' and '.join(tags)} away")

    def resume_memory(self, *tags: str) -> None:
        """They have memory for ``tags`` again."""
        calls = self.engines.start(EngineActor.resume_memory, *tags)
        self._watch.wait(calls, what=f"the engines to get {' and '.join(tags)} back")

    def leave(self) -> None:
        """A router of somebody else knows the run's engines no more.

        Raises:
            EngineError: it does not answer, or refused.
        """
        if self._remote is not None:
            self._remote.leave()

    def stopping(self) -> list[Call[None]]:
        """Begin to stop every server that was started here; those of others go on."""
        actors: list[Actor[ServerActor]] = [*self.engines, *([self._router] if self._router else [])]
        return [actor.start(ServerActor.stop) for actor in actors]
