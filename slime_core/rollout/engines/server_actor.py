"""What the actors around a server program share: a watched life."""

from __future__ import annotations

from typing import Protocol

from slime_core.cluster.actors import Watched, control

__all__ = ["Server", "ServerActor"]


class Server(Protocol):
    """A program that was started as a child process, such as an engine or the router."""

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting at most ``timeout_s`` seconds for it; None: as long as it takes."""

    def check_alive(self) -> None:
        """Returns if it runs, otherwise raises an EngineError with its last lines."""

    def stop(self) -> None:
        """Nothing of it is left."""


class ServerActor(Watched):
    """Watches and stops ``server``, also while the actor's main thread is busy with it; starting is the subclass's."""

    def __init__(self, server: Server) -> None:
        self._watched = server
        self._stopping = False

    @control
    def watch(self) -> None:
        """Returns when the server was stopped, and fails when it dies: the background call that ends a run's waits.

        Raises:
            EngineError: it died; the message ends with its last lines.
        """
        self._watched.wait_end()
        if not self._stopping:
            self._watched.check_alive()

    @control
    def stop(self) -> None:
        """Nothing of the server is left; also while it is still starting, and no later start brings it up."""
        self._stopping = True
        self._watched.stop()
