"""PUBLIC. HTTP services for rewards and tools, and the auxiliary models that a run serves.

:class:`Service` sends JSON and receives JSON; it can neither hang nor end a run. Every request has one time limit over
all its attempts. No connection and 5xx are retried with growing pauses. A refusal (4xx) and a redirection are final,
except the statuses in ``retry_statuses``. A retry waits at least as long as the service says in Retry-After. Messages
show addresses without user, password and query, which may be secrets.

``model_url`` returns the address of an auxiliary model (``--rm-model``, ``[[engine.engine_models]]``), ``with_secrets``
fills in the environment variables that a URL names. Engines and routers of the run require its key: ``Service`` sends
it, requests by other clients add ``engine_headers(url)``, and ``refused_key`` recognises the refusal of a request
without it. Before a run, ``url_mistakes`` and ``missing_secrets`` check a URL that a setting gives, and ``shown`` is
the URL in messages. A request without an answer raises :class:`~slime_core.errors.ServiceError`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import cast
from urllib.parse import urlsplit

import aiohttp

from slime_core.config.engines import model_url
from slime_core.config.secrets import SECRET, engine_headers, refused_key, secret_names, shown, unset, written_out
from slime_core.errors import ConfigError, ServiceError
from slime_core.types import JsonValue

__all__ = [
    "Service",
    "engine_headers",
    "missing_secrets",
    "model_url",
    "refused_key",
    "shown",
    "url_mistakes",
    "with_secrets",
]


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

LARGEST_ANSWER = 16 * 2**20
"""Bytes of the largest answer that is read."""

BODY_LOOKED_AT = 2**16
"""Bytes of an answer that are read for a quotation, and in which secrets are masked."""

BODY_SHOWN = 200
"""Characters of an answer that an error quotes."""

SHORTEST_SECRET = 4
"""Characters of the shortest secret that is masked; a shorter one may be part of any answer."""


def url_mistakes(url: str, *, header: str | None = None) -> Iterator[str]:
    """Yield the mistakes in the address of a service, to follow the name of the setting; no message shows a secret.

    Example: ``is not an address of a service; accepted: http://HOST:PORT/PATH, or the same with https``.

    Arguments:
        header: the flag, with its value, by which a secret can be sent as a header instead; None: there is none.
    """
    host = _host(url)
    if host is None:
        yield "is not an address of a service; accepted: http://HOST:PORT/PATH, or the same with https"
        return
    instead = "" if header is None else f", or have it sent as a header with {header}"
    for secret in written_out(url):
        yield (
            f"holds {secret} for {host} written out, which the record of the run would show; export it and write "
            f"${{NAME}} in its place{instead}"
        )


def _host(url: str) -> str | None:
    """Return the host of ``url``; None: it is not an address."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return None
    return parts.hostname if parts.scheme in ("http", "https") and has_port else None


def missing_secrets(url: str) -> list[str]:
    """Return the environment variables that ``url`` names and that are not set in this process."""
    return list(unset(*secret_names(url)))


def with_secrets(url: str) -> str:
    """Replace every ``${NAME}`` in ``url`` by that environment variable, so that no setting has to hold a secret.

    Raises:
        ConfigError: a variable is not set.
    """
    missing = missing_secrets(url)
    if missing:
        raise ConfigError(
            f"the URL {shown(url)} names the environment variable {missing[0]}, which is not set where the sampler "
            "runs. Export it before the run, on a cluster in the runtime environment of the job."
        )
    return SECRET.sub(lambda found: os.environ[found[1]], url)


def _token(name: str, url: str) -> str:
    token = os.environ.get(name, "").strip()
    if token and token.isascii() and token.isprintable():
        return token
    found = "holds no text that a header can carry" if name in os.environ else "is not set where the sampler runs"
    raise ConfigError(
        f"the token for {shown(url)} is read from the environment variable {name}, which {found}. Export one line of "
        "ASCII before the run, on a cluster in the runtime environment of the job."
    )


class Service:
    """Client of a service that answers JSON with JSON. Overlapping requests share connections, closed after the last.

    Arguments:
        url: where requests are posted; it may name environment variables, see :func:`with_secrets`.
        timeout_s: seconds until a request must be answered, all attempts and waiting for a connection included.
        max_in_flight: concurrent requests.
        token_env: environment variable whose value is sent as ``Authorization: Bearer``; None: no such header.
        retry_statuses: refusals (4xx) after which the request is repeated.
        retries: whether failed attempts are repeated.

    Attributes:
        shown: the URL as messages show it, without secrets.

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
        retry_statuses: Sequence[int] = (),
        retries: bool = True,
    ) -> None:
        self.shown = shown(url)
        self._url = with_secrets(url)
        headers = engine_headers(self._url)  # not empty if the URL is that of an engine of the run
        self._headers = headers if token_env is None else {"Authorization": f"Bearer {_token(token_env, url)}"}
        self._secrets = {name: os.environ[name].strip() for name in [*secret_names(url), *filter(None, [token_env])]}
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._retry_statuses = retry_statuses
        self._retries = retries
        self._num_open = 0
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, body: JsonValue) -> JsonValue:
        """Post ``body`` and return the service's answer.

        Raises:
            ServiceError: there is no answer, or none that can be used.
        """
        deadline_s, attempts = time.monotonic() + self._timeout_s, 0
        async with self._connected() as session:
            while True:
                attempts += 1
                try:
                    return await self._attempt(session, body, deadline_s)
                except _RetryError as failure:
                    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
                    pause_s = max(pause_s, failure.wait_s)
                    if not self._retries or time.monotonic() + pause_s >= deadline_s:
                        raise self._given_up(failure, attempts) from None
                await asyncio.sleep(pause_s)

    async def _attempt(self, session: aiohttp.ClientSession, body: JsonValue, deadline_s: float) -> JsonValue:
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
            raise _RetryError("no answer", "timeout") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _RetryError(type(error).__name__, "unreachable") from error
        except aiohttp.ClientError as error:
            raise ServiceError(f"{self.shown} cannot be requested: {type(error).__name__}", "refused") from error
        return self._read(status, content, wait_s)

    def _read(self, status: int, content: bytes, wait_s: float) -> JsonValue:
        text = self._masked(content[:BODY_LOOKED_AT].decode(errors="replace"))[:BODY_SHOWN]
        if status in self._retry_statuses or status >= 500:
            waits = f", to be repeated in {wait_s:g} s" if wait_s else ""
            raise _RetryError(f"status {status}{waits}: {text}", "unavailable", status, wait_s)
        if status != 200:
            raise ServiceError(f"{self.shown} refused with status {status}: {text}", "refused", status)
        if len(content) > LARGEST_ANSWER:
            raise ServiceError(f"{self.shown} answered with more than {LARGEST_ANSWER} bytes", "invalid", status)
        try:
            return cast(JsonValue, json.loads(content))
        except (ValueError, RecursionError):
            raise ServiceError(f"{self.shown} answered with no JSON: {text}", "invalid", status) from None

    def quote(self, answer: JsonValue) -> str:
        """Return the start of ``answer`` for a message, with secrets masked."""
        return f"{self.shown} answered {self._masked(repr(answer))[:BODY_SHOWN]}"

    def _masked(self, text: str) -> str:
        """Mask the secrets in ``text``; a service may repeat them in its answer."""
        for name, value in self._secrets.items():
            text = text.replace(value, "${" + name + "}") if len(value) >= SHORTEST_SECRET else text
        return text

    def _given_up(self, last: _RetryError, attempts: int) -> ServiceError:
        tried = f"{self._timeout_s:g} s and {attempts} attempts; the last one failed with {last}"
        return ServiceError(f"{self.shown} gave no answer within {tried}", last.cause, last.status, gave_up=True)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        # Opened by the first of overlapping requests, closed by the last: no caller has to close anything.
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


class _RetryError(ServiceError):
    """Failure of an attempt that may be repeated after at least ``wait_s`` seconds; the message is the reason."""

    def __init__(self, reason: str, cause: str, status: int | None = None, wait_s: float = 0.0) -> None:
        super().__init__(reason, cause, status)
        self.wait_s = wait_s


def _wait_s(header: str) -> float:
    """Parse Retry-After, a number of seconds or a date (RFC 9110, section 10.2.3), into seconds; 0: neither."""
    if header.isascii() and header.isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
