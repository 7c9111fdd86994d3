"""Ends the requests of a client before their time, with the tokens that they have.

Engines are told again and again while it lasts, since a request may have been on its way to one, and whoever sent it: a
generate function may ask them by itself. An engine that does not answer holds nobody up: its requests end by their own
limit, or are cancelled by whoever waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

__all__ = ["OK", "Ending"]

OK = 200

OUT_OF_REACH = (aiohttp.ClientError, TimeoutError, OSError)
"""What a call raises that did not come through."""

PAUSE_S = 0.25
"""Between two rounds of telling the engines."""

LIMIT_S = 5.0
"""For a call that generates nothing."""


class Ending:
    """The requests of one client, as far as their end goes.

    Arguments:
        url: of the router (or of one engine).
        session: the client's connections.

    Attributes:
        is_on: nothing is to be sent.
    """

    def __init__(self, url: str, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._url, self._session = url, session
        self.is_on = False

    @asynccontextmanager
    async def ended(self) -> AsyncIterator[None]:
        """Requests end while the block runs; nothing that an engine does to this raises."""
        self.is_on = True
        telling = asyncio.create_task(self._tell())
        try:
            yield
        finally:
            self.is_on = False
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell(self) -> None:
        while True:
            await asyncio.gather(*(self._call("POST", f"{url}/abort_request") for url in await self._engines()))
            await asyncio.sleep(PAUSE_S)

    async def _engines(self) -> list[str]:
        """Those behind the router; an engine that is asked itself knows no such list."""
        match await self._call("GET", f"{self._url}/workers"):
            case {"workers": [*entries]}:
                return [entry["url"] for entry in entries if isinstance(entry, dict) and "url" in entry]
        return [self._url]

    async def _call(self, method: str, url: str) -> Any:
        """What was answered; None: nothing, or a refusal."""
        limit, body = aiohttp.ClientTimeout(total=LIMIT_S), {"abort_all": True} if method == "POST" else None
        with suppress(*OUT_OF_REACH, ValueError):
            async with self._session().request(method, url, json=body, timeout=limit) as response:
                return await response.json(content_type=None) if response.status == OK else None
        return None
