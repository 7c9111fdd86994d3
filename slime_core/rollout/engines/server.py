"""A program that listens on a port: what an engine and the router have in common."""

from __future__ import annotations

import http.client
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from slime_core.errors import EngineError
from slime_core.rollout.engines.process import ServerProcess

__all__ = ["Server", "free_ports"]

POLL_S = 0.05
LONGEST_ANSWER_S = 5.0
"""Limit of one probe, in seconds."""

ADDRESS_IN_USE = "address already in use"
"""The operating system's message, in lower case."""

SEARCHED_LINES = 200
"""Log lines to search: SGLang prints that message some 60 lines before its end."""


class Server(ABC):
    """One program, from :meth:`start` to :meth:`stop`; it dies with this process, whatever ends it.

    ``url`` is where it listens, known when :meth:`wait_ready` has returned.

    Arguments:
        name: for messages.
        host: address to listen on.
        env: its whole environment.
        log_file: receives its output.
        start_timeout_s: seconds until it must answer.
    """

    probe: ClassVar[str]
    """The path that answers 200 once the server accepts requests."""

    def __init__(self, name: str, *, host: str, env: Mapping[str, str], log_file: Path, start_timeout_s: float) -> None:
        self.url, self._port = "", 0
        self._host, self._start_timeout_s = host, start_timeout_s
        self._process = ServerProcess(name, env=env, log_file=log_file)

    @abstractmethod
    def command(self, port: int, second: int) -> list[str]:
        """Program and arguments of a server that listens on ``port``; ``second`` is another free port."""

    def start(self) -> None:
        """Start the program; :meth:`wait_ready` waits until it answers."""
        self._port, second = free_ports(2, host=self._host)
        self.url = f"http://{self._host}:{self._port}"
        self._process.start(self.command(self._port, second))

    def wait_ready(self) -> None:
        """Wait until it accepts requests. Restarts it on another port if another program took its port meanwhile.

        Raises:
            EngineError: it died, or did not answer in time; the message ends with the last lines of its log.
        """
        try:
            self._wait_answer()
        except EngineError:
            if not self._lost_its_port():
                raise
            self.start()
            self._wait_answer()

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, after waiting at most ``timeout_s`` seconds for it; None: as long as it takes."""
        return self._process.wait_end(timeout_s)

    def check_alive(self) -> None:
        """Returns if the program runs; it ends by itself when one of its parts does.

        Raises:
            EngineError: it ended; the message ends with the last lines of its log.
        """
        if not self._process.is_alive():
            raise self._process.death()

    def stop(self) -> None:
        """End it and all its processes, within 5 seconds."""
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait_answer(self) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if self._process.wait_end(POLL_S):
                raise self._process.death()
            if time.monotonic() > deadline_s:
                raise self._process.failure(
                    f"did not answer at {self.url}{self.probe} within {self._start_timeout_s:g} s."
                )

    def _answers(self) -> bool:
        # Another program may have taken the port and answer too: the engine of another run.
        return _is_ok(self._host, self._port, self.probe) and self._process.listens(self._port)

    def _lost_its_port(self) -> bool:
        """Whether the program ended because another one had taken its port; a start on another port may then
        succeed."""
        lines = self._process.last_lines(SEARCHED_LINES) if self._process.wait_end(0) else []
        return any(ADDRESS_IN_USE in line.lower() for line in lines)


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """``count`` different ports of ``host`` that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _is_ok(host: str, port: int, path: str) -> bool:
    # http.client ignores proxy settings: a loopback address must not go through a proxy.
    connection = http.client.HTTPConnection(host, port, timeout=LONGEST_ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
