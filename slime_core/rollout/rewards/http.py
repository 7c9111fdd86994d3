"""Asks a service for rewards by HTTP, such that it can neither hang nor end a run.

Every question has a time limit over all its attempts. What may pass is tried again with growing pauses: no connection
and 5xx. A refusal (4xx) and a redirection are final, unless the run names the status (``rm_retry_statuses``). Where a
service says how long to wait (Retry-After), the next attempt comes no earlier. Addresses are shown without user,
password and query, which may be secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from slime_core.config.secrets import SECRET, secret_names, shown, unset
from slime_core.errors import ConfigError
from slime_core.rollout.rewards.pool import RewardFailure

__all__ = ["Service", "with_secrets"]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
PASSING = (408, 425, 429)
"""The refusals that say nothing about the question: too slow, too early, too many."""

LARGEST_ANSWER = 16 * 2**20
"""Bytes; a longer answer is no list of rewards."""

BODY_LOOKED_AT = 2**16
"""Bytes of an answer in which secrets are looked for before it is quoted."""

BODY_SHOWN = 200
"""Characters of an answer that a failure quotes."""

SHORTEST_SECRET = 4
"""Characters; a shorter one is a word that an answer may hold anyway."""


def with_secrets(url: str) -> str:
    """``url`` with every ``${NAME}`` replaced by that environment variable, so that no setting has to hold a secret.

    Raises:
        ConfigError: a variable is not set.
    """
    missing = next(unset(*secret_names(url)), None)
    if missing is not None:
        raise ConfigError(
            f"the URL {shown(url)} names the environment variable {missing}, which is not set where the sampler "
            "runs. Export it before the run, on a cluster in the runtime environment of the job."
        )
    return SECRET.sub(lambda found: os.environ[found[1]], url)


def _token(name: str) -> str:
    token = os.environ.get(name, "").strip()
    if token and token.isascii() and token.isprintable():
        return token
    found = "holds nothing that a header can carry" if name in os.environ else "is not set where the sampler runs"
    raise ConfigError(
        f"rm_token_env names the environment variable {name}, which {found}. Export one line of ASCII before the run, "
        "on a cluster in the runtime environment of the job."
    )


class Service:
    """Something that answers JSON with JSON; connections are shared by questions that overlap, and closed after them.

    Arguments:
        url: where questions go; it may name environment variables, see :func:`with_secrets`.
        timeout_s: seconds until a question must be answered, all attempts and waiting for room included.
        max_in_flight: questions under way at once.
        token_env: environment variable whose value is sent as ``Authorization: Bearer``; None: no such header.
        retry_statuses: refusals after which it is asked again; None: there are none, and no setting names any.

    Raises:
        ConfigError: an environment variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_in_flight: int,
        token_env: str | None = None,
        retry_statuses: Sequence[int] | None = None,
    ) -> None:
        self._url, self.shown = with_secrets(url), shown(url)
        token = None if token_env is None else _token(token_env)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._secrets = {name: os.environ[name].strip() for name in [*secret_names(url), *filter(None, [token_env])]}
        self._timeout_s, self._max_in_flight, self._retry_statuses = timeout_s, max_in_flight, retry_statuses
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
                pause_s = max(pause_s, answer.wait_s)
                if time.monotonic() + pause_s >= deadline_s:
                    return self._given_up(answer, attempts)
                await asyncio.sleep(pause_s)

    async def _attempt(self, session: aiohttp.ClientSession, body: object, deadline_s: float) -> Any:
        limit = aiohttp.ClientTimeout(total=max(0.001, deadline_s - time.monotonic()))
        try:
            async with session.post(
                self._url, json=body, headers=self._headers, timeout=limit, allow_redirects=False
            ) as response:
                status, wait_s = response.status, _wait_s(response.headers.get("Retry-After", ""))
                content = await response.content.read(LARGEST_ANSWER + 1)
                while len(content) <= LARGEST_ANSWER and not response.content.at_eof():
                    content += await response.content.read(LARGEST_ANSWER + 1 - len(content))
        except TimeoutError:
            return _Again("timeout", "no answer")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Again("unreachable", type(error).__name__)
        except aiohttp.ClientError as error:
            return RewardFailure("refused", f"{self.shown} cannot be asked: {type(error).__name__}")
        return self._read(status, content, wait_s)

    def _read(self, status: int, content: bytes, wait_s: float) -> Any:
        text = self.masked(content[:BODY_LOOKED_AT].decode(errors="replace"))[:BODY_SHOWN]
        if status in (self._retry_statuses or ()) or status >= 500:
            waits = f", to be asked again in {wait_s:g} s" if wait_s else ""
            return _Again("unavailable", f"status {status}{waits}: {text}", wait_s)
        if status != 200:
            is_passing = status in PASSING and self._retry_statuses is not None
            asks = f"; --rm-retry-statuses {status} asks again after it" if is_passing else ""
            return RewardFailure("refused", f"{self.shown} refused with status {status}{asks}: {text}")
        if len(content) > LARGEST_ANSWER:
            return RewardFailure("invalid", f"{self.shown} answered with more than {LARGEST_ANSWER} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return RewardFailure("invalid", f"{self.shown} answered with no JSON: {text}")

    def told(self, answer: object) -> str:
        """What it answered, for a message."""
        return f"{self.shown} answered {self.masked(repr(answer))[:BODY_SHOWN]}"

    def masked(self, text: str) -> str:
        """``text`` without the secrets, which a service may repeat in what it says of a question."""
        for name, value in self._secrets.items():
            text = text.replace(value, "${" + name + "}") if len(value) >= SHORTEST_SECRET else text
        return text

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
    """Why an attempt failed that may be repeated, and how many seconds later at the earliest."""

    def __init__(self, cause: str, reason: str, wait_s: float = 0.0) -> None:
        self.cause, self.reason, self.wait_s = cause, reason, wait_s


def _wait_s(header: str) -> float:
    """What Retry-After asks for, a number of seconds or a date (RFC 9110, section 10.2.3); 0: nothing readable."""
    if header.isascii() and header.isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
