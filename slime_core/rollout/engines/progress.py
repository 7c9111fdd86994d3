"""Whether the engines of a request still compute, from the counters that SGLang publishes at ``/v1/loads``.

A request is answered once, when all its responses are complete: nothing of it arrives meanwhile. The counters are of
the whole engine (sglang 0.5.23, srt/managers/load_snapshot.py) and stand still when its scheduler does. Streams would
show the tokens of one response, but each part repeats the log-probabilities of all parts before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any

from slime_core.rollout.engines.server import READY

LOADS = "/v1/loads"

COUNTERS = ("decode_moments", "total_prefill_uncached_tokens", "num_used_tokens")
"""Sums over decode steps, prefilled tokens, tokens in the KV cache. The lengths of queues also change while an engine
stands still."""

Ask = Callable[[str], Awaitable[tuple[int, Any]]]
"""From a URL to status and parsed answer; status 0: none came."""


class EngineProgress:
    """Remembers when each engine's counters changed last.

    Arguments:
        ask: sends a GET.
        engines: from the URL that a request was sent to (an engine, or a router) to the engines behind it.
    """

    def __init__(self, ask: Ask, engines: Callable[[str], Awaitable[list[str]]]) -> None:
        self._ask = ask
        self._engines = engines
        self._counters: dict[str, list[Any]] = {}
        self._moved_s: dict[str, float] = {}
        self._looked_s: dict[str, float] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def last_s(self, url: str, *, interval_s: float) -> float:
        """When (``time.monotonic``) an engine behind ``url`` was last seen to have computed or to be paused; 0: never.

        Starts the next look, whose result a later call returns; looks are ``interval_s`` apart.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s.get(url, -interval_s) >= interval_s:
            self._looked_s[url] = now_s
            look = asyncio.create_task(self._look(url))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
        return self._moved_s.get(url, 0.0)

    def close(self) -> None:
        """End the looks under way."""
        for look in self._looks:
            look.cancel()

    async def _look(self, url: str) -> None:
        moved = [await self._has_moved(engine) for engine in await self._engines(url)]
        if any(moved):
            self._moved_s[url] = time.monotonic()

    async def _has_moved(self, engine: str) -> bool:
        status, answer = await self._ask(f"{engine}{LOADS}")
        found = list(_counters(answer)) if status == HTTPStatus.OK else []
        before = self._counters.get(engine)
        if not found or found == before:
            # A paused engine holds its requests on purpose; the calls that pause it have limits of their own.
            return bool(found) and (await self._ask(f"{engine}{READY}"))[0] == HTTPStatus.SERVICE_UNAVAILABLE
        self._counters[engine] = found
        return before is not None


def _counters(answer: Any) -> Iterator[Any]:
    """The counters of each scheduler of an engine; none where the answer is not SGLang's."""
    loads = answer.get("loads") if isinstance(answer, dict) else None
    for load in loads if isinstance(loads, list) else []:
        if isinstance(load, dict):
            yield [load.get(name) for name in COUNTERS]
