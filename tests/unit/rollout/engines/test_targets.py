"""Engines that are called directly, and sessions."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from slime_core.errors import EngineError
from slime_core.generation import SamplingParams
from slime_core.rollout.engines.client import GenerateClient, Targets
from slime_testing.fake_engine import FakeEngine

URLS = ["http://a", "http://b", "http://c"]
SHORT = SamplingParams(max_new_tokens=2)


def test_the_least_busy_engine_is_next():
    targets = Targets(URLS)
    with ExitStack() as under_way:
        chosen = [under_way.enter_context(targets.one(session=None)) for _ in range(6)]
    assert chosen == URLS * 2
    with targets.one(session=None) as first, targets.one(session=None) as second:
        assert [first, second] == URLS[:2]


def test_a_session_stays_with_its_engine_however_busy_it_is():
    targets = Targets(URLS)
    with targets.one(session="s") as first, targets.one(session="s") as second:
        assert first == second
    homes = {session: home(URLS, session) for session in map(str, range(60))}
    assert set(homes.values()) == set(URLS)
    moved = [session for session in homes if home(URLS[:2], session) != homes[session]]
    assert moved == [session for session in homes if homes[session] == URLS[2]]


def home(urls: list[str], session: str) -> str:
    with Targets(urls).one(session=session) as url:
        return url


@pytest.mark.parametrize("session", [None, "s"])
def test_after_a_failure_the_others_come_first(session):
    targets, failed = Targets(URLS), []
    for _ in URLS:
        with targets.one(session=session, failed=failed) as url:
            failed.append(url)
    assert sorted(failed) == URLS


async def test_a_client_spreads_requests_over_engines_and_goes_round_one_that_is_gone():
    with FakeEngine() as one, FakeEngine() as two:
        one.delay_s = two.delay_s = 0.01
        urls = [one.url, two.url]
        async with GenerateClient("http://router", engines=urls) as client:
            await asyncio.gather(*(client.generate([3], sampling=SHORT) for _ in range(8)))
            assert (len(one.sampled), len(two.sampled)) == (4, 4)
            one.stop()
            await asyncio.gather(*(client.generate([3], sampling=SHORT) for _ in range(3)))
            assert len(two.sampled) == 7


async def test_a_session_travels_as_the_routers_header():
    with FakeEngine() as engine:
        async with GenerateClient(engine.url) as client:
            await client.generate([3], sampling=SHORT)
            await client.generate([3], sampling=SHORT, session="talk")
        assert engine.keys == [None, "talk"]


async def test_an_engine_that_was_called_directly_is_named():
    with FakeEngine() as engine:
        engine.fail_with = [400]
        async with GenerateClient("http://router", engines=[engine.url]) as client:
            with pytest.raises(EngineError, match=f"{engine.url}/generate .*status 400"):
                await client.generate([3], sampling=SHORT)
