"""Asks a service for rewards by HTTP, such that it can neither hang nor end a run.

Every question has a time limit over all its attempts. What may pass is tried again with growing pauses: no connection,
5xx, 408 and 429. Any other refusal (4xx) and a redirection are the question's own fault and are final. Addresses are
shown without user, password and query, which may be secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slime_core.errors import ConfigError
from slime_core.rollout.rewards.pool import RewardFailure

__all__ = ["Service", "shown", "with_secrets"]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
AGAIN = (408, 429)
"""The two refusals that say nothing about the question: too slow, too many."""

LARGEST_ANSWER = 16 * 2**20
"""Bytes; a longer answer is no list of rewards."""

BODY_SHOWN = 200
"""Characters of an answer that a failure quotes."""

_SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def shown(url: str) -> str:
    """``url`` for people: scheme, host, port and path alone."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def with_secrets(url: str) -> str:
    """``url`` with every ``${NAME}`` replaced by that environment variable, so that no setting has to hold a secret.

    Raises:
        ConfigError: a variable is not set.
    """
    missing = [name for name in _SECRET.findall(url) if name not in os.environ]
    if missing:
        raise ConfigError(
            f"the URL {shown(url)} names the environment variable {missing[0]}, which is not set where the sampler "
            "runs. Export it before the run, on a cluster in the runtime environment of the job."
        )
    return _SECRET.sub(lambda found: os.environ[found[1]], url)


class Service:
    """Something that answers JSON with JSON; connections are shared by questions that overlap, and closed after them.

    Arguments:
        url: where questions go; it may name environment variables, see :func:`with_secrets`.
        timeout_s: seconds until a question must be answered, all attempts and waiting for room included.
        max_in_flight: questions under way at once.
    """

    def __init__(self, url: str, *, timeout_s: float, max_in_flight: int) -> None:
        self._url, self.shown = with_secrets(url), shown(url)
        self._timeout_s, self._max_in_flight = timeout_s, max_in_flight
        self._num_open = 0
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, body: object) -> Any:
        """What the service answers to ``body``, both as JSON; a :class:`RewardFailure` where there is no answer."""
        deadline_s, attempts = time.monotonic() + self._timeout_s, 0
        async with self._connected() as session:
            while True:
                attempts += 1
                answer = await self._attempt(session, body, deadline_s)
                if not isinstance(answer, _Again):
                    return answer
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s >= deadline_s:
                    return self._given_up(answer, attempts)
                await asyncio.sleep(pause_s)

    async def _attempt(self, session: aiohttp.ClientSession, body: object, deadline_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=max(0.001, deadline_s - time.monotonic()))
        try:
            async with session.post(self._url, json=body, timeout=limit, allow_redirects=False) as response:
                status, content = response.status, await response.content.read(LARGEST_ANSWER + 1)
                while len(content) <= LARGEST_ANSWER and not response.content.at_eof():
                    content += await response.content.read(LARGEST_ANSWER + 1 - len(content))
        except TimeoutError:
            return _Again("timeout", "no answer")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Again("unreachable", type(error).__name__)
        except aiohttp.ClientError as error:
            return RewardFailure("refused", f"{self.shown} cannot be asked: {type(error).__name__}")
        return self._read(status, content)

    def _read(self, status: int, content: bytes) -> Any:
        text = content[: BODY_SHOWN * 4].decode(errors="replace")[:BODY_SHOWN]
        if status in AGAIN or status >= 500:
            return _Again("unavailable", f"status {status}: {text}")
        if status != 200:
            return RewardFailure("refused", f"{self.shown} refused with status {status}: {text}")
        if len(content) > LARGEST_ANSWER:
            return RewardFailure("invalid", f"{self.shown} answered with more than {LARGEST_ANSWER} bytes")
        try:
            return json.loads(content)
        except ValueError:
            return RewardFailure("invalid", f"{self.shown} answered with no JSON: {text}")

    def _given_up(self, last: _Again, attempts: int) -> RewardFailure:
        return RewardFailure(
            last.cause,
            f"{self.shown} gave no reward within {self._timeout_s:g} s (--reward-timeout-s) and {attempts} attempts; "
            f"the last one failed with {last.reason}",
        )

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        # Opened by the first of questions that overlap, closed by the last: nothing is left for somebody to close.
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._max_in_flight))
        session, self._num_open = self._session, self._num_open + 1
        try:
            yield session
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._session = None
                await session.close()


class _Again:
    """Why an attempt failed that may be repeated."""

    def __init__(self, cause: str, reason: str) -> None:
        self.cause, self.reason = cause, reason
