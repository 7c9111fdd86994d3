"""Retrievers of passages: one at a URL, or the built-in retriever.

The HTTP interface is that of the paper's repository, whose dense retriever works unchanged: the answer to ``POST
/retrieve`` with ``{"queries": [...], "topk": 3, "return_scores": true}`` is
``{"result": [[{"document": {"contents": ...}, "score": ...}]]}``, one list a query; without scores, a list
contains the documents themselves.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from slime_core.errors import ServiceError
from slime_core.services import Service
from slime_core.types import JsonValue
from slime_searchr1.index import CORPUS, Index, Passage, read_corpus
from slime_searchr1.options import SearchOptions

__all__ = ["EmbeddedRetriever", "RemoteRetriever", "Retriever", "make_retriever"]


class Retriever(Protocol):
    """Finds passages."""

    async def search(self, query: str) -> list[Passage]:
        """Return passages that match ``query``, best first.

        Raises:
            ServiceError: there is no answer, or an invalid one.
        """
        ...


class EmbeddedRetriever:
    """The index in this process; searches run in threads, so that a large corpus does not delay engine requests."""

    def __init__(self, index: Index, *, topk: int) -> None:
        self._index = index
        self._topk = topk

    async def search(self, query: str) -> list[Passage]:
        """See :class:`Retriever`."""
        return await asyncio.to_thread(self._index.search, query, self._topk)


class RemoteRetriever:
    """A retriever at a URL; :class:`~slime_core.services.Service` retries failed requests."""

    def __init__(self, service: Service, *, topk: int) -> None:
        self._service = service
        self._topk = topk

    async def search(self, query: str) -> list[Passage]:
        """See :class:`Retriever`."""
        answer = await self._service.ask({"queries": [query], "topk": self._topk, "return_scores": True})
        try:
            return _passages(answer)[: self._topk]
        except ValueError:
            quoted = self._service.quote(answer)
            raise ServiceError(
                f'{quoted}; accepted: {{"result": [[{{"document": {{"contents": ...}}}}]]}}', "invalid"
            ) from None


def _passages(answer: JsonValue) -> list[Passage]:
    """Return the passages of the first query; raises ValueError if ``answer`` is malformed."""
    result = answer.get("result") if isinstance(answer, dict) else None
    entries = result[0] if isinstance(result, list) and result else None
    if not isinstance(entries, list):
        raise ValueError
    return [_passage(entry) for entry in entries]


def _passage(entry: JsonValue) -> Passage:
    if not isinstance(entry, dict):
        raise ValueError
    document = entry.get("document", entry)
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise ValueError
    score = entry.get("score")
    return Passage(contents, float(score) if isinstance(score, int | float) else None)


def make_retriever(options: SearchOptions) -> Retriever:
    """Create the retriever of a run.

    Raises:
        DataError: the corpus cannot be read.
        ConfigError: an environment variable of the URL is not set.
    """
    if options.search_url is None:
        return EmbeddedRetriever(Index(read_corpus(options.corpus or CORPUS)), topk=options.topk)
    service = Service(options.search_url, timeout_s=options.search_timeout_s, max_in_flight=options.search_concurrency)
    return RemoteRetriever(service, topk=options.topk)
