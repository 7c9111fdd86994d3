"""A router that somebody else started: it is told of the run's engines, and at the end that they are gone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slime_core.errors import EngineError

__all__ = ["RemoteRouter", "ask_router"]

CALL_LIMIT_S = 10.0
TAKEN_IN_LIMIT_S = 60.0
POLL_S = 0.05


class RemoteRouter:
    """The sglang-router at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._added: list[str] = []

    def add(self, workers: Sequence[str]) -> None:
        """The engines at these addresses get requests; one that the router has already stays its owner's.

        Raises:
            EngineError: the router does not answer, refused one, or did not take all in within a minute.
        """
        known = {entry["url"] for entry in self._entries()}
        for worker in workers:
            if worker not in known:
                ask_router(self.url, "POST", "/workers", {"url": worker})
                self._added.append(worker)
        deadline_s = time.monotonic() + TAKEN_IN_LIMIT_S
        while missing := set(workers) - {entry["url"] for entry in self._entries() if entry["is_healthy"]}:
            if time.monotonic() > deadline_s:
                raise EngineError(f"The router at {self.url} did not take in {sorted(missing)}")
            time.sleep(POLL_S)

    def leave(self) -> None:
        """The router sends nothing to the engines that :meth:`add` told it of.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        added, self._added = self._added, []
        for entry in self._entries() if added else []:
            if entry["url"] in added:
                ask_router(self.url, "DELETE", f"/workers/{entry['id']}")

    def _entries(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = ask_router(self.url, "GET", "/workers")["workers"]
        return entries


def ask_router(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the router at ``url`` answers, parsed from JSON; None: an empty answer.

    Raises:
        EngineError: it does not answer within 10 seconds, not in JSON, or it refused.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=CALL_LIMIT_S)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"The router at {url} did not answer {method} {path}: {error!r}") from error
    finally:
        connection.close()
    if response.status >= http.client.BAD_REQUEST:
        raise EngineError(f"The router at {url} refused {method} {path} with status {response.status}: {text}")
    try:
        return json.loads(text) if text else None
    except ValueError:
        raise EngineError(f"What answers at {url} is no sglang-router: {method} {path} gave {text[:100]!r}") from None
