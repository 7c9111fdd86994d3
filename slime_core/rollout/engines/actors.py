"""Ray actors that run a server: the actor has the placement and the devices; the server dies with the actor.

    EngineActor, RouterActor  start and watch one server
    Restarts                  restarts servers that died or hang, in the same place and at the same address

The driver restarts servers: an actor watches its server (:meth:`ServerActor.watch`), and its failure reaches the
driver through a wait, which it would otherwise end. Then

    leave     the router sends no further requests to the server
    stop      the actor ends with all processes of the server; the sampler's client retries its requests elsewhere
    launch    after a pause that doubles, a new actor starts the server in the same bundle, at the same address
    weights   an engine of the policy waits until the learner has published its weights
    join      the router sends requests to it again

None of these steps waits: the driver's waits call :meth:`Restarts.poll` every half second.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import ray

from slime_core.errors import EngineError, NodeDied, ServerDied, SlimeError
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings, SGLangServer
from slime_core.rollout.engines.server import Server, free_ports
from slime_core.runtime.actors import Actor, ActorGroup, Call, Launch, Watched, control, start_actor
from slime_core.runtime.placement import ActorPlacement
from slime_core.runtime.waiting import has_ended, wait
from slime_core.weights.engine_control import EngineControl, PauseMode

CONTROL_LIMIT_S = 600.0

LOOK_S = 5.0
"""Seconds between two looks at whether a server is suspended."""

PARTS_STOP_S = 4.0
"""Seconds for the parts of an engine on other nodes to stop; the actor's own limit is longer."""

SUSPENDED_LIMIT_S = 30.0
"""Seconds that a server may be suspended: longer than a debugger or a container that is moved takes."""


class ServerActor(Watched):
    """Starts, watches and stops ``server``; can stop it while the actor's main thread still waits for its start."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stopping = False

    def start(self, port: int = 0) -> str:
        """Start the server, wait until it accepts requests, and return its URL.

        Arguments:
            port: to listen on, as the server that this one replaces; 0: a free one.

        Raises:
            EngineError: it died, was stopped, or did not answer in time; the message ends with the last lines of its
                log.
        """
        self._server.start(port)
        self._server.wait_ready()
        return self._server.url

    @control
    def watch(self) -> None:
        """Return when the server was stopped; fail when it dies. The error ends the waits of the run.

        Raises:
            ServerDied: it died, a signal has stopped it for a while, or it hangs; the message ends with the last lines
                of its log.
        """
        try:
            self._watch()
        except EngineError as error:
            raise ServerDied(str(error)) from None

    def _watch(self) -> None:
        since_s: float | None = None
        hangs = threading.Event()
        # In a separate thread, because a request waits as long as the engine is busy.
        threading.Thread(target=self._watch_answers, args=(hangs,), name="engine answers", daemon=True).start()
        while not self._server.wait_end(LOOK_S):
            since_s = (since_s or time.monotonic()) if self._server.suspended() else None
            if since_s is not None and time.monotonic() - since_s >= SUSPENDED_LIMIT_S:
                raise self._server.suspension(SUSPENDED_LIMIT_S)
            if hangs.is_set():
                raise self._server.hang()
        if not self._stopping:
            self._server.check_alive()

    def _watch_answers(self, hangs: threading.Event) -> None:
        if self._server.wait_hang():
            hangs.set()

    @control
    def stop(self) -> None:
        """End the server, even while it starts; a later start fails."""
        self._stopping = True
        self._server.stop()


class EngineActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.engine.SGLangServer`.

    Of an engine over several nodes it runs the part of rank 0. It starts an actor for each of the other parts, which
    ends with it; if a part fails, the engine ends.
    """

    _server: SGLangServer

    def __init__(
        self, settings: EngineSettings, *, reachable: bool = False, further: Sequence[ActorPlacement] = ()
    ) -> None:
        host = _host(settings.host, reachable)
        settings = replace(settings, host=host)
        if further:
            meeting = f"{host}:{free_ports(1, host=host)[0]}"
            settings = replace(settings, num_nodes=1 + len(further), meeting_address=meeting)
        self._on_gpus = settings.device != "cpu"
        self._parts = ActorGroup(
            tuple(_start_part(settings, rank, placement) for rank, placement in enumerate(further, 1))
        )
        self._part_failure: SlimeError | None = None
        super().__init__(SGLangServer(settings))

    def start(self, port: int = 0) -> str:
        """As :meth:`ServerActor.start`, with all parts of the engine."""
        if self._parts:
            threading.Thread(target=self._watch_parts, name="other nodes", daemon=True).start()
        with self._named_cause():
            return super().start(port)

    def _watch(self) -> None:
        with self._named_cause():
            super()._watch()

    def _watch_parts(self) -> None:
        never_s = math.inf
        try:
            wait(self._parts.start(EngineActor.start), what="the other nodes", warn_after_s=never_s)
            watches = self._parts.start(EngineActor.watch)
            wait(watches, what="the other nodes", warn_after_s=never_s, fail_after_s=never_s)
        except SlimeError as error:
            self._part_failure = error
            self._server.stop()

    @contextmanager
    def _named_cause(self) -> Iterator[None]:
        try:
            yield
        except EngineError:
            if self._part_failure is None or self._stopping:
                raise
            raise self._part_failure from None

    @control
    def stop(self) -> None:
        """As :meth:`ServerActor.stop`, with all parts of the engine."""
        self._stopping = True
        calls = self._parts.start(EngineActor.stop)
        self._server.stop()
        with suppress(SlimeError):
            wait(calls, what="the other nodes to stop", fail_after_s=PARTS_STOP_S)

    def bootstrap_port(self) -> int:
        """Return the port from which a prefill engine sends its KV cache, 0 for other engines. The engine must run."""
        return self._server.bootstrap_port

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; see :meth:`EngineControl.pause`."""
        self._control().pause(mode)

    def resume(self) -> None:
        """Generate again."""
        self._control().resume()

    def release_memory(self, *tags: str) -> None:
        """Free the memory of ``tags``; the server must be idle."""
        self._control().release_memory(*tags)

    def resume_memory(self, *tags: str) -> None:
        """Allocate the memory of ``tags`` again."""
        self._control().resume_memory(*tags)

    def _control(self) -> EngineControl:
        # The caller of the actor has a limit too; this limit only ends the thread.
        return EngineControl([self._server.url], timeout_s=CONTROL_LIMIT_S)

    def gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the engine's GPUs in the order of its processes; empty without nvidia-smi."""
        if not self._on_gpus:
            return ()
        parts = wait(self._parts.start(EngineActor.gpus), what="the GPUs of the other nodes")
        return self._local_gpus() + sum(parts, ())

    def _local_gpus(self) -> tuple[str, ...]:
        # nvidia-smi, because torch would leave a CUDA context on every GPU.
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", os.environ["CUDA_VISIBLE_DEVICES"]]
        try:
            output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ()
        return tuple(line.strip().removeprefix("GPU-") for line in output.splitlines())


class RouterActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.engine.Router`."""

    def __init__(self, settings: RouterSettings, *, reachable: bool = False) -> None:
        super().__init__(Router(replace(settings, host=_host(settings.host, reachable))))


def start_engine(
    settings: EngineSettings, *, placement: ActorPlacement | None = None, reachable: bool = False
) -> Actor[EngineActor]:
    """Start an actor for one server in ``placement`` and return at once; call :meth:`ServerActor.start` on it, then
    :meth:`ServerActor.watch`.

    Arguments:
        reachable: listen on the node's own address, so that other nodes can reach it; otherwise on ``settings.host``.
    """
    further = placement.further if placement is not None else ()
    return start_actor(Launch(settings.name, placement), EngineActor, settings, reachable=reachable, further=further)


def _start_part(settings: EngineSettings, rank: int, placement: ActorPlacement) -> Actor[EngineActor]:
    log_file = settings.log_file.with_stem(f"{settings.log_file.stem}-node-{rank}")
    settings = replace(settings, node_rank=rank, name=f"{settings.name} node {rank}", log_file=log_file)
    return start_engine(settings, placement=placement, reachable=True)


def start_router(settings: RouterSettings, *, reachable: bool = False) -> Actor[RouterActor]:
    """Start an actor for the router, as :func:`start_engine`."""
    return start_actor(Launch("router"), RouterActor, settings, reachable=reachable)


def _host(stated: str, reachable: bool) -> str:
    return str(ray.util.get_node_ip_address()) if reachable else stated


WINDOW_S = 3600.0
"""Seconds over which the restarts of a server are counted."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

STOP_LIMIT_S = 7.0
"""Seconds for an actor to end its server, which takes it six at most; then both are killed."""

POLL_S = 0.1

S = TypeVar("S", bound=ServerActor)


@dataclass(slots=True, eq=False)
class RestartableServer(Generic[S]):
    """A server that can be replaced.

    Arguments:
        name: for messages and metrics, ``"engine 1"``.
        launch: starts an actor for it, always in the same placement, and returns at once.
        leave: removes it from its router, without waiting.
        join: adds it to its router, without waiting.
        needs_weights: after a restart, it must get the learner's weights before it joins.
    """

    name: str
    launch: Callable[[], Actor[S]]
    leave: Callable[[], None]
    join: Callable[[], None]
    needs_weights: bool = False
    url: str = ""
    """Its address, which a replacement keeps; empty until the first start has ended."""
    actor: Actor[S] = field(init=False)
    """The actor that runs it."""
    starting: Call[str] | None = None
    stopping: Call[None] | None = None
    watching: Call[None] | None = None
    restarts_s: list[float] = field(default_factory=list)
    """When it was restarted, by ``time.monotonic``."""
    due_s: float = 0.0
    """When the next actor may start."""

    def start(self) -> Call[str]:
        """Start an actor, and the server in it; the call returns its address."""
        self.actor, self.stopping = self.launch(), None
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.starting = self.actor.start(ServerActor.start, port)
        return self.starting

    def watch(self) -> Call[None]:
        """Watch the started server."""
        self.starting, self.watching = None, self.actor.start(ServerActor.watch)
        return self.watching

    @property
    def is_down(self) -> bool:
        """True while it is being replaced."""
        return self.stopping is not None or self.starting is not None


class Restarts:
    """Replaces servers that fail; implements :class:`~slime_core.runtime.waiting.Recovery`.

    Arguments:
        limit: restarts of one server within an hour.
        warn: receives a message for each restart.
    """

    def __init__(self, limit: int, *, warn: Callable[[str], None]) -> None:
        self._limit = limit
        self._warn = warn
        self._servers: list[RestartableServer[Any]] = []
        self._unserved: list[RestartableServer[Any]] = []
        self._counts: Counter[str] = Counter()

    def watch(self, server: RestartableServer[Any]) -> None:
        """Watch the started ``server``, and replace it when it fails."""
        server.watch()
        self._servers.append(server)

    def monitors(self) -> Sequence[Call[object]]:
        """Return the calls that watch servers."""
        return [server.watching for server in self._servers if server.watching is not None]

    def accept(self, call: Call[object], error: SlimeError) -> bool:
        """Replace the server that ``call`` watches; return whether it did. A server whose node died is not replaced,
        because its address is gone.

        Raises:
            EngineError: the server has been replaced too often.
        """
        failed = [] if isinstance(error, NodeDied) else [server for server in self._servers if server.watching == call]
        for server in failed:
            self._replace(server, error)
        return bool(failed)

    def poll(self) -> None:
        """Start servers whose predecessors have ended, and watch servers that have started."""
        for server in self._servers:
            if server.stopping is not None and time.monotonic() >= server.due_s and self._has_stopped(server):
                server.actor.kill()
                server.start()
            elif server.starting is not None and has_ended(server.starting):
                self._finish(server, server.starting)

    def take_counts(self) -> dict[str, float]:
        """Return the restarts since the last call, as metrics ``rollout/restarts/NAME``."""
        counts, self._counts = self._counts, Counter()
        return {f"rollout/restarts/{name.replace(' ', '_')}": float(count) for name, count in counts.items()}

    # --- Weights -----------------------------------------------------------------------------------------------------

    def settle(self, *, within_s: float = 0.0) -> bool:
        """Wait until no engine of the policy is down; return whether any of them needs weights.

        Arguments:
            within_s: also wait up to this many seconds for an engine to fail, because its client may notice first.

        Raises:
            EngineError: a server has been replaced too often.
        """
        deadline_s = time.monotonic() + within_s
        while self._is_down() or (time.monotonic() < deadline_s and not self._unserved):
            for call in self.monitors():
                if has_ended(call):
                    self._take(call)
            self.poll()
            time.sleep(POLL_S)
        return bool(self._unserved)

    def _take(self, call: Call[object]) -> None:
        try:
            wait([call], what=str(call))
        except SlimeError as error:
            if not self.accept(call, error):
                raise

    def served(self) -> None:
        """Register restarted engines with the router; every engine must hold the learner's weights."""
        unserved, self._unserved = self._unserved, []
        for server in unserved:
            if not server.is_down:
                self._join(server)

    def serve(self, publish: Callable[[], None]) -> None:
        """``publish`` the learner's weights if a restarted engine waits for them and no other engine is down.

        For waits during which the learner is idle; at other times the engine gets the next publication.
        """
        if self._unserved and not self._is_down():
            publish()
            self.served()

    def _is_down(self) -> bool:
        return any(server.is_down and server.needs_weights for server in self._servers)

    # --- One server --------------------------------------------------------------------------------------------------

    def _replace(self, server: RestartableServer[Any], error: SlimeError) -> None:
        now_s = time.monotonic()
        server.restarts_s = [at_s for at_s in server.restarts_s if now_s - at_s < WINDOW_S]
        count = len(server.restarts_s)
        if count >= self._limit:
            raise EngineError(
                f"{server.name} has failed after {count} restarts within an hour, the limit --engine-max-restarts "
                f"{self._limit}. Find out why; then resume the run with --load RUN_FOLDER. Its last failure:\n{error}"
            )
        server.restarts_s.append(now_s)
        server.due_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**count)
        self._counts[server.name] += 1
        reason = str(error).partition("\n")[0]  # the rest is the end of its log, and how to resume a run that has ended
        self._warn(f"{server.name} is started again (restart {count + 1} of {self._limit} within an hour): {reason}")
        server.watching = server.starting = None
        self._unserved = [other for other in self._unserved if other is not server]
        server.leave()
        server.stopping = server.actor.start(ServerActor.stop)

    def _has_stopped(self, server: RestartableServer[Any]) -> bool:
        assert server.stopping is not None
        return has_ended(server.stopping) or time.monotonic() >= server.restarts_s[-1] + STOP_LIMIT_S

    def _finish(self, server: RestartableServer[Any], starting: Call[str]) -> None:
        try:
            (url,) = wait([starting], what=f"{server.name} to start")
            if url != server.url:
                raise EngineError(f"{server.name} could not listen at {server.url}: another program has taken the port")
        except SlimeError as error:
            self._replace(server, error)
            return
        server.watch()
        if server.needs_weights:
            self._unserved.append(server)
        else:
            self._join(server)

    def _join(self, server: RestartableServer[Any]) -> None:
        server.join()
        self._warn(
            f"{server.name} gets requests again, {time.monotonic() - server.restarts_s[-1]:.0f} s after it failed"
        )
