"""Ray actors that run a server: the actor holds the placement slot and the devices, the server dies with the actor."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import ray

from slime_core.errors import EngineError, ServerDied, SlimeError
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings, SGLangServer
from slime_core.rollout.engines.server import Server, free_ports
from slime_core.runtime.actors import Actor, ActorGroup, Launch, Watched, control, start_actor
from slime_core.runtime.placement import Slot
from slime_core.runtime.waiting import wait
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
        self._watched = server
        self._stopping = False

    def start(self, port: int = 0) -> str:
        """Start the server, wait until it accepts requests, and return its URL.

        Arguments:
            port: to listen on, as the server that this one replaces; 0: a free one.

        Raises:
            EngineError: it died, was stopped, or did not answer in time; the message ends with the last lines of its
                log.
        """
        self._watched.start(port)
        self._watched.wait_ready()
        return self._watched.url

    @control
    def watch(self) -> None:
        """Return when the server was stopped, and fail when it dies; the error ends the waits of the run.

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
        # In a thread of its own, because a request waits as long as the engine is busy.
        threading.Thread(target=self._watch_answers, args=(hangs,), name="engine answers", daemon=True).start()
        while not self._watched.wait_end(LOOK_S):
            since_s = (since_s or time.monotonic()) if self._watched.suspended() else None
            if since_s is not None and time.monotonic() - since_s >= SUSPENDED_LIMIT_S:
                raise self._watched.suspension(SUSPENDED_LIMIT_S)
            if hangs.is_set():
                raise self._watched.hang()
        if not self._stopping:
            self._watched.check_alive()

    def _watch_answers(self, hangs: threading.Event) -> None:
        if self._watched.wait_hang():
            hangs.set()

    @control
    def stop(self) -> None:
        """End the server, even while it starts; a later start fails."""
        self._stopping = True
        self._watched.stop()


class EngineActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.engine.SGLangServer`.

    Of an engine over several nodes it runs the part of rank 0. It owns an actor for each of the other parts, which ends
    when this one does; when a part fails, the engine ends.
    """

    def __init__(self, settings: EngineSettings, *, reachable: bool = False, further: Sequence[Slot] = ()) -> None:
        host = _host(settings.host, reachable)
        settings = replace(settings, host=host)
        if further:
            meeting = f"{host}:{free_ports(1, host=host)[0]}"
            settings = replace(settings, num_nodes=1 + len(further), meeting_address=meeting)
        self._server = SGLangServer(settings)
        self._on_gpus = settings.device != "cpu"
        self._parts = ActorGroup(tuple(_start_part(settings, rank, slot) for rank, slot in enumerate(further, 1)))
        self._part_failure: SlimeError | None = None
        super().__init__(self._server)

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
        """The port where a prefill engine hands over its KV cache; 0: it is no prefill engine. The engine must have
        started."""
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
        # The caller of the actor has its own limit; this one only ends the thread.
        return EngineControl([self._server.url], timeout_s=CONTROL_LIMIT_S)

    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the engine's GPUs, in the order of its processes; empty on a CPU, or where nvidia-smi fails."""
        if not self._on_gpus:
            return ()
        parts = wait(self._parts.start(EngineActor.gpus), what="the GPUs of the other nodes")
        return self._own_gpus() + sum(parts, ())

    def _own_gpus(self) -> tuple[str, ...]:
        # nvidia-smi, because torch would leave a CUDA context on every GPU.
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", os.environ["CUDA_VISIBLE_DEVICES"]]
        try:
            found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ()
        return tuple(line.strip().removeprefix("GPU-") for line in found.splitlines())


class RouterActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.engine.Router`."""

    def __init__(self, settings: RouterSettings, *, reachable: bool = False) -> None:
        super().__init__(Router(replace(settings, host=_host(settings.host, reachable))))


def start_engine(settings: EngineSettings, *, slot: Slot | None = None, reachable: bool = False) -> Actor[EngineActor]:
    """Start an actor for one server in ``slot`` and return at once; call :meth:`ServerActor.start` on it, then
    :meth:`ServerActor.watch`.

    Arguments:
        reachable: listen on the node's own address, so that other nodes can reach it; otherwise on ``settings.host``.
    """
    further = slot.further if slot is not None else ()
    return start_actor(Launch(settings.name, slot), EngineActor, settings, reachable=reachable, further=further)


def _start_part(settings: EngineSettings, rank: int, slot: Slot) -> Actor[EngineActor]:
    log_file = settings.log_file.with_stem(f"{settings.log_file.stem}-node-{rank}")
    own = replace(settings, node_rank=rank, name=f"{settings.name} node {rank}", log_file=log_file)
    return start_engine(own, slot=slot, reachable=True)


def start_router(settings: RouterSettings, *, reachable: bool = False) -> Actor[RouterActor]:
    """Start an actor for the router, as :func:`start_engine`."""
    return start_actor(Launch("router"), RouterActor, settings, reachable=reachable)


def _host(stated: str, reachable: bool) -> str:
    return str(ray.util.get_node_ip_address()) if reachable else stated
