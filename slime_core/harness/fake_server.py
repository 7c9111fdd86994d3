"""A server on a loopback port, in a thread of this process, that answers by path and fails on demand.

Concurrency: handlers run in the server's own event loop; the test reads and sets its attributes from outside,
between requests.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Self

from aiohttp import web

from slime_core.types import JsonValue

__all__ = ["Answer", "FakeServer", "Handler"]

START_LIMIT_S = 60.0

ACCEPT_TURNS = 4
"""Turns of an asyncio loop from a socket that was accepted last to a connection that the server knows and can close."""

CLOSE_TURNS = 2
"""Turns from asking for the end of a connection to a closed socket."""

Answer = tuple[int, JsonValue]
"""A status, and what is sent as JSON."""

Handler = Callable[[dict[str, JsonValue]], Coroutine[None, None, Answer]]
"""From the parsed body of a request to the answer."""


class FakeServer(ABC):
    """Listens on a loopback port from :meth:`start` to :meth:`stop`; usable as a context manager.

    Arguments:
        faulty: the path whose requests meet ``faults``.

    Attributes:
        url: where it listens, once it has been started.
        calls: the requested paths, in order.
        headers: of each request to ``faulty``, in order.
        faults: what the next requests to ``faulty`` meet, first one first: ``reset``: the connection is cut; ``torn``:
            it is cut within an answer; ``garbage``: the answer is no JSON; ``hang``: none comes.
    """

    def __init__(self, *, faulty: str) -> None:
        self.url = ""
        self.calls: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.faults: list[str] = []
        self._faulty = faulty
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._ready = threading.Event()
        self._stopping = asyncio.Event()

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """Path -> what answers there; any other path is not found."""

    def start(self) -> None:
        """It listens at ``url``."""
        self._thread.start()
        if not self._ready.wait(START_LIMIT_S):
            raise TimeoutError(f"the {type(self).__name__} did not start")

    def stop(self) -> None:
        """Nobody listens any more; open requests are cut."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_LIMIT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        handler = self.handlers().get(request.path)
        if handler is None:
            return web.json_response({"error": "not found"}, status=404)
        body = await request.json() if request.can_read_body else {}
        if request.path == self._faulty:
            self.headers.append(request.headers)
            if self.faults:
                return await self._fail(request, self.faults.pop(0))
        status, answer = await handler(body)
        return web.json_response(answer, status=status)

    async def _fail(self, request: web.Request, fault: str) -> web.Response:
        if fault == "garbage":
            return web.Response(text="no JSON {", content_type="application/json")
        if fault == "hang":
            await self._stopping.wait()
        if fault == "torn":
            torn = web.StreamResponse(headers={"Content-Length": "1000"})
            await torn.prepare(request)
            await torn.write(b'{"text": "')
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await server.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(server, listening).start()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._ready.set()
        await self._stopping.wait()
        # A server that closes while it accepts leaks the socket (Server._attach in Python 3.11): first accept no more.
        self._loop.remove_reader(listening)
        await _turns(ACCEPT_TURNS)
        await server.cleanup()
        await _turns(CLOSE_TURNS)


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
