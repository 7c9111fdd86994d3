"""One SGLang server where Ray placed it: the actor holds the seat and the devices, the server uses them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import ray

from slime_core.cluster.actors import Actor, start_actor
from slime_core.cluster.placement import Slot
from slime_core.rollout.engines.engine import EngineSettings, SGLangServer
from slime_core.rollout.engines.server_actor import ServerActor
from slime_core.weights.endpoints import EngineControl, PauseMode

__all__ = ["EngineActor", "start_engine"]


CONTROL_LIMIT_S = 600.0


class EngineActor(ServerActor):
    """Runs one :class:`~slime_core.rollout.engines.engine.SGLangServer`; when the actor dies, so does the server.

    Arguments:
        settings: of the server.
        reachable: listen on the node's own address, so that other nodes can reach the server; otherwise on
            ``settings.host``.
    """

    def __init__(self, settings: EngineSettings, *, reachable: bool = False) -> None:
        host = ray.util.get_node_ip_address() if reachable else settings.host
        self._server = SGLangServer(replace(settings, host=host))
        self._on_gpus = settings.device != "cpu"
        super().__init__(self._server)

    def start(self) -> str:
        """The server takes requests at the URL that is returned.

        Raises:
            EngineError: it died or did not come up in time; the message ends with its last lines. Or it was stopped.
        """
        self._server.start()
        self._server.wait_ready()
        return self._server.url

    def bootstrap_port(self) -> int:
        """Where a prefill engine that has started hands the cache over; 0: it is none."""
        return self._server.bootstrap_port

    def pause(self, mode: PauseMode) -> None:
        """The server generates nothing from here on; see :meth:`EngineControl.pause`."""
        self._control().pause(mode)

    def resume(self) -> None:
        """The server generates again."""
        self._control().resume()

    def release_memory(self, *tags: str) -> None:
        """The server has given the memory of ``tags`` away; it must be idle."""
        self._control().release_memory(*tags)

    def resume_memory(self, *tags: str) -> None:
        """The server has memory for ``tags`` again."""
        self._control().resume_memory(*tags)

    def _control(self) -> EngineControl:
        # Whoever calls the actor waits no longer than it wants to; the limit here only ends a thread.
        return EngineControl([self._server.url], timeout_s=CONTROL_LIMIT_S)

    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the engine's GPUs, in the order of its processes; none on a CPU, or where nobody can say."""
        if not self._on_gpus:
            return ()
        # The driver's own tool: asking torch would leave a CUDA context on every GPU.
        query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", os.environ["CUDA_VISIBLE_DEVICES"]]
        try:
            found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return ()
        return tuple(line.strip().removeprefix("GPU-") for line in found.splitlines())


def start_engine(settings: EngineSettings, *, slot: Slot | None = None, reachable: bool = False) -> Actor:
    """Start an actor for one server in ``slot`` and return at once; call ``start`` on it, then ``watch``."""
    return start_actor(EngineActor, settings, reachable=reachable, label=settings.name, slot=slot)
