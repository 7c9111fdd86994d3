"""The bound on requests in flight: who enters, when, and what a cancelled one leaves behind."""

from __future__ import annotations

import asyncio

from slime_core.rollout.engines.client import InFlightLimit


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that enter ``limit`` and stay until they are let go."""

    def __init__(self, places: int) -> None:
        self.inside: list[int] = []
        self._limit = InFlightLimit(places)
        self._doors: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, count: int) -> None:
        for _ in range(count):
            self._doors.append(asyncio.Event())
            self.tasks.append(asyncio.create_task(self._visit(len(self.tasks))))
        await settle()

    def let_go(self, number: int) -> None:
        self._doors[number].set()

    async def _visit(self, number: int) -> None:
        async with self._limit:
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
        async with limit:
            raise KeyError("inside")

    assert [type(one) for one in await asyncio.gather(fail(), fail(), return_exceptions=True)] == [KeyError, KeyError]
