"""Which address a request goes to: the router's, which chooses an engine itself, or an engine's own.

Engines are asked directly where the router would lose a part of the request: sglang-router 0.3.2 knows the fields of a
request by name and leaves out ``return_routed_experts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

__all__ = ["ROUTING_KEY", "Targets", "session_headers"]

ROUTING_KEY = "x-smg-routing-key"
"""The header by which sglang-router 0.3.2 keeps a session with one engine (policies ``consistent_hashing``,
``manual``)."""


class Targets:
    """Chooses among ``urls``: the one that a session belongs to, or the one with the fewest requests under way.

    A session belongs to the URL with the highest hash of both (rendezvous hashing), so that each process chooses alike
    and an engine more or less moves few sessions. After a failure the others are tried first.

    Arguments:
        urls: of engines; or of a router alone.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._under_way = Counter(dict.fromkeys(urls, 0))

    @contextmanager
    def one(self, *, session: str | None, failed: Sequence[str] = ()) -> Iterator[str]:
        """The URL for one attempt, which counts as under way inside the block.

        Arguments:
            session: of the conversation; None: the request stands alone.
            failed: URLs at which this request has failed, once for each time.
        """
        failures = Counter(failed)
        ranked = sorted(self._under_way, key=lambda url: (failures[url], self._rank(url, session)))
        chosen = ranked[0]
        self._under_way[chosen] += 1
        try:
            yield chosen
        finally:
            self._under_way[chosen] -= 1

    def _rank(self, url: str, session: str | None) -> int:
        if session is None:
            return self._under_way[url]
        return -int.from_bytes(blake2b(f"{session} {url}".encode(), digest_size=8).digest(), "big")


def session_headers(session: str | None) -> dict[str, str]:
    """What tells a router to which conversation a request belongs; None: to none."""
    return {} if session is None else {ROUTING_KEY: session}
