"""Rewards in processes of their own: one that hangs, crashes or eats memory costs its own samples, and nothing else.

    seats   a process each; one is handed a call when it would begin with it at once, so that no call stands behind one
            that computes or hangs, and those that wait for something overlap
    apart   as many, started when a process has died: each repeats one of the samples that were lost at a time, so that
            only the guilty ones fail

N samples that hang therefore take about N / workers time limits, and cost nobody else his own. All processes load
exactly the driver's plugins. See :mod:`slime_core.rollout.rewards.process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from slime_core.rollout.rewards.process import Answers, RewardPoolSettings, RewardProcess
from slime_core.types import Reward, RewardFailure, Sample

__all__ = ["RewardPool", "RewardPoolSettings"]

CALLS_A_PROCESS = 16
"""Calls in flight in one process; more wait here, where nothing can happen to them."""

CLOSED = RewardFailure("crash", "the processes of reward models were ended before it was scored")


class RewardPool:
    """Starts processes when they are needed; belongs to one event loop. :meth:`close` leaves none behind."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._each: set[str] = set()
        self._seats, self._apart = (
            [_Seat(settings, place, self._each) for place in range(settings.num_workers)] for _ in range(2)
        )
        self._free, self._alone = _queue(self._seats), _queue(self._apart)
        self._room = asyncio.Semaphore(settings.num_workers * CALLS_A_PROCESS)
        self._is_closed = False

    async def score(self, name: str, samples: Sequence[Sample], *, together: bool) -> list[Reward | RewardFailure]:
        """A reward or a failure for each of ``samples``, in order.

        Arguments:
            name: of the reward model.
            together: the model has to see all of them at once; if it fails, they all do. One that has said of itself
                that it scores each by itself is asked again like the others.

        Raises:
            PluginError: a process cannot load the run's plugins.
        """
        found = await self._shared(name, list(samples))
        if not isinstance(found, RewardFailure):
            return found
        whole = together and name not in self._each
        parts = [list(samples)] if whole else [[sample] for sample in samples]
        if len(parts) == 1 and (found.own or not found.lost):
            return [found] * len(samples)
        again = self._isolated if found.lost else self._shared
        answers = await asyncio.gather(*(again(name, part) for part in parts))
        return [one for part, answer in zip(parts, answers, strict=True) for one in _each(answer, len(part))]

    async def close(self) -> None:
        """End every process; calls under way fail, and are not asked again."""
        self._is_closed = True
        await asyncio.gather(*(seat.close() for seat in [*self._seats, *self._apart]))

    async def _shared(self, name: str, samples: list[Sample]) -> Answers:
        async with self._room:
            _, _, seat = await self._free.get()
            with ExitStack() as turn:
                turn.callback(lambda: self._free.put_nowait(seat.entry))
                return CLOSED if self._is_closed else await seat.score(name, samples, idle=turn.close)

    async def _isolated(self, name: str, samples: list[Sample]) -> Answers:
        _, _, seat = await self._alone.get()
        try:
            return CLOSED if self._is_closed else await seat.score(name, samples)
        finally:
            self._alone.put_nowait(seat.entry)


class _Seat:
    """One process after the other: a new one where the last has ended, or is stuck and only finishes what it has."""

    def __init__(self, settings: RewardPoolSettings, place: int, each: set[str]) -> None:
        self._settings, self._place, self._each = settings, place, each
        self._process: RewardProcess | None = None
        self._starting = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self.num_calls = 0

    @property
    def entry(self) -> _Entry:
        """In a queue of seats: that with the fewest calls comes first, and of such the same again."""
        return self.num_calls, self._place, self

    async def score(self, name: str, samples: list[Sample], *, idle: Callable[[], None] | None = None) -> Answers:
        self.num_calls += 1
        try:
            return await (await self._ready()).score(name, samples, idle=idle)
        finally:
            self.num_calls -= 1

    async def _ready(self) -> RewardProcess:
        async with self._starting:
            if self._process is None or not self._process.takes_calls:
                last, self._process = self._process, None
                if last is not None:
                    task = asyncio.create_task(last.drain())
                    self._draining.add(task)
                    task.add_done_callback(self._draining.discard)
                self._process = await RewardProcess.start(self._settings, apart=self._each)
            return self._process

    async def close(self) -> None:
        async with self._starting:
            if self._process is not None:
                await self._process.end("crash")
            await asyncio.gather(*self._draining)


_Entry = tuple[int, int, _Seat]


def _queue(seats: Sequence[_Seat]) -> asyncio.PriorityQueue[_Entry]:
    """The seats that would begin with a call at once; each stands in it once, so that seats are never compared."""
    queue: asyncio.PriorityQueue[_Entry] = asyncio.PriorityQueue()
    for seat in seats:
        queue.put_nowait(seat.entry)
    return queue


def _each(answer: Answers, count: int) -> list[Reward | RewardFailure]:
    return [answer] * count if isinstance(answer, RewardFailure) else answer
