"""The bound on sequences in flight: who enters, when, and what a cancelled one leaves behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slime_core.rollout.engines import client
from slime_core.rollout.engines.client import InFlightLimit


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


async def test_as_many_are_inside_as_there_are_places_and_the_first_enters_first() -> None:
    crowd = Crowd(2)
    await crowd.come(5)
    assert crowd.inside == [0, 1]
    crowd.let_go(1)
    await settle()
    assert crowd.inside == [0, 2]
    crowd.let_go(0)
    crowd.let_go(2)
    await settle()
    assert crowd.inside == [3, 4]
    crowd.let_go(3)
    crowd.let_go(4)
    await asyncio.gather(*crowd.tasks)
    await crowd.come(3)
    assert crowd.inside == [5, 6]
    for number in (5, 6, 7):
        crowd.let_go(number)
    await asyncio.gather(*crowd.tasks)


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


async def test_an_unanswered_request_keeps_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, 2)
    crowd = Crowd(2, engines.limit)
    await crowd.come(3, sequences=1)
    for _ in range(3):
        await engines.look(0)
    assert crowd.inside == [0, 1]
    await crowd.leave()


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


async def test_engines_that_do_not_answer_give_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, 8)
    crowd = Crowd(8, engines.limit)
    await crowd.come(2, sequences=8)
    for _ in range(3):
        await engines.look(None)
    assert crowd.inside == [0]
    await crowd.leave()


async def test_one_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    crowd = Crowd(1)
    await crowd.come(3)
    crowd.tasks[1].cancel()
    await settle()
    crowd.let_go(0)
    await settle()
    assert crowd.inside == [2]
    crowd.let_go(2)
    await asyncio.gather(*crowd.tasks, return_exceptions=True)


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


async def test_an_error_inside_frees_the_place() -> None:
    limit = InFlightLimit(1)

    async def fail() -> None:
        async with limit.hold(1):
            raise KeyError("inside")

    assert [type(one) for one in await asyncio.gather(fail(), fail(), return_exceptions=True)] == [KeyError, KeyError]
