"""Which requests enter, where they go, and which engines get an abort."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.generation import SamplingParams
from slime_core.rollout.engines import client
from slime_core.rollout.engines.client import GenerateClient, InFlightLimit, RequestAborter, Targets
from slime_testing.fake_engine import FakeEngine


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that enter ``limit`` and stay until they are let go."""

    def __init__(self, places: int, limit: InFlightLimit | None = None) -> None:
        self.inside: list[int] = []
        self._limit = limit or InFlightLimit(places)
        self._doors: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, count: int, *, sequences: int = 1) -> None:
        for _ in range(count):
            self._doors.append(asyncio.Event())
            self.tasks.append(asyncio.create_task(self._visit(len(self.tasks), sequences)))
        await settle()

    def let_go(self, number: int) -> None:
        self._doors[number].set()

    async def leave(self) -> None:
        """Let all go, those included that have not entered."""
        for door in self._doors:
            door.set()
        await asyncio.gather(*self.tasks)

    async def _visit(self, number: int, sequences: int) -> None:
        async with self._limit.hold(sequences):
            self.inside.append(number)
            await self._doors[number].wait()
            self.inside.remove(number)


async def test_a_request_takes_a_place_for_each_of_its_sequences() -> None:
    crowd = Crowd(8)
    await crowd.come(1, sequences=6)
    await crowd.come(1, sequences=4)
    await crowd.come(1, sequences=2)
    assert crowd.inside == [0]  # the small one does not overtake the large one
    crowd.let_go(0)
    await settle()
    assert crowd.inside == [1, 2]
    await crowd.come(2, sequences=20)
    assert crowd.inside == [1, 2]
    crowd.let_go(1)
    crowd.let_go(2)
    await settle()
    assert crowd.inside == [3]  # one with more sequences than places is alone
    await crowd.leave()


class Engines:
    """Engines that say how many sequences they work on whenever the test looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: int) -> None:
        self.running: int | None = 0
        self.limit = InFlightLimit(places, self._running)
        self._asked, self._looks = 0, asyncio.Semaphore(0)

        async def sleep(_: float) -> None:
            await self._looks.acquire()

        monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))

    async def _running(self) -> int | None:
        self._asked += 1
        return self.running

    async def look(self, running: int | None) -> None:
        before, self.running = self._asked, running
        self._looks.release()
        while self._asked == before:
            await asyncio.sleep(0)
        await settle()


async def test_sequences_that_are_complete_give_their_places_to_requests_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch, 16)
    crowd = Crowd(16, engines.limit)
    await crowd.come(4, sequences=8)
    assert crowd.inside == [0, 1]
    await engines.look(16)
    assert crowd.inside == [0, 1]
    await engines.look(9)  # seven are complete, and eight places are needed
    assert crowd.inside == [0, 1]
    await engines.look(8)
    assert crowd.inside == [0, 1, 2]
    await engines.look(2)  # the third request may not be counted yet
    assert crowd.inside == [0, 1, 2]
    await engines.look(8)
    assert crowd.inside == [0, 1, 2, 3]
    await crowd.leave()
    assert engines.limit.num_inside == 0


async def test_an_answer_takes_back_the_places_that_its_request_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, 8)
    crowd = Crowd(8, engines.limit)
    await crowd.come(2, sequences=4)
    await crowd.come(1, sequences=3)
    await engines.look(8)
    await engines.look(5)
    assert crowd.inside == [0, 1, 2]
    await crowd.come(2, sequences=4)
    crowd.let_go(0)
    await settle()
    assert crowd.inside == [1, 2]  # 4 + 3 sequences
    crowd.let_go(2)
    await settle()
    assert crowd.inside == [1, 3]
    await crowd.leave()


async def test_one_that_is_cancelled_when_its_turn_has_come_hands_the_place_on() -> None:
    crowd = Crowd(1)
    await crowd.come(3)
    crowd.let_go(0)
    await asyncio.sleep(0)  # 0 has left, 1 has not run yet
    crowd.tasks[1].cancel()
    await settle()
    assert crowd.inside == [2]
    crowd.let_go(2)
    await asyncio.gather(*crowd.tasks, return_exceptions=True)
    assert crowd.tasks[1].cancelled()


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
