"""Which engines get abort requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_core.rollout.engines.client import RequestAborter

URL = "http://127.0.0.1:1"


async def aborted(workers: Any) -> list[str]:
    """The addresses that get an abort request where ``/workers`` answers ``workers``."""
    found: list[str] = []
    ending = RequestAborter(URL, lambda: pytest.fail("no connection is needed"))

    async def call(method: str, url: str) -> Any:
        if method == "GET":
            return 200, workers
        found.append(url)
        return 200, None

    ending._call = call  # type: ignore[method-assign]
    async with ending.aborting():
        for _ in range(5):  # one round of abort requests
            await asyncio.sleep(0)
    return found


async def test_every_engine_of_a_router_gets_the_abort():
    assert await aborted({"workers": [{"url": "http://a"}, {"url": "http://b"}]}) == [
        "http://a/abort_request",
        "http://b/abort_request",
    ]


@pytest.mark.parametrize("answer", [None, [], {"detail": "not found"}, {"workers": None}])
async def test_an_address_without_a_list_of_workers_is_an_engine(answer: Any):
    assert await aborted(answer) == [f"{URL}/abort_request"]
