"""Whom requests are ended at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_core.rollout.engines.client import RequestAborter

URL = "http://127.0.0.1:1"


async def told(workers: Any) -> list[str]:
    """Who is told to abort where ``/workers`` answers ``workers``."""
    found: list[str] = []
    ending = RequestAborter(URL, lambda: pytest.fail("no connection is needed"))

    async def call(method: str, url: str) -> Any:
        if method == "GET":
            return workers
        found.append(url)
        return None

    ending._call = call  # type: ignore[method-assign]
    async with ending.aborting():
        for _ in range(5):  # one round of telling
            await asyncio.sleep(0)
    return found


async def test_every_engine_behind_a_router_is_reached():
    assert await told({"workers": [{"url": "http://a"}, {"url": "http://b"}]}) == [
        "http://a/abort_request",
        "http://b/abort_request",
    ]


@pytest.mark.parametrize("answer", [None, [], {"detail": "not found"}, {"workers": None}])
async def test_who_knows_no_list_of_engines_is_one(answer: Any):
    assert await told(answer) == [f"{URL}/abort_request"]
