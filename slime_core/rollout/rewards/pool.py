"""Rewards in processes of their own: one that hangs, crashes or eats memory costs its own samples, and nothing else.

When a process dies, the calls that it had are repeated one by one in a process kept for that, so that only the guilty
one fails. All of them load exactly the driver's plugins. See :mod:`slime_core.rollout.rewards.process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_core.rollout.rewards.process import Answers, Reward, RewardFailure, RewardPoolSettings, RewardProcess
from slime_core.types import Sample

__all__ = ["Reward", "RewardFailure", "RewardPool", "RewardPoolSettings"]

CALLS_A_PROCESS = 16
"""Calls in flight in one process; more wait here, where nothing can happen to them."""

CLOSED = RewardFailure("crash", "the processes of reward models were ended before it was scored")


class RewardPool:
    """Starts processes when they are needed; belongs to one event loop. :meth:`close` leaves none behind."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._settings = settings
        self._seats = [_Seat(settings) for _ in range(settings.num_workers)]
        self._apart = _Seat(settings)
        self._alone = asyncio.Lock()
        self._room = asyncio.Semaphore(settings.num_workers * CALLS_A_PROCESS)
        self._is_closed = False

    async def score(self, name: str, samples: Sequence[Sample], *, together: bool) -> list[Reward | RewardFailure]:
        """A reward or a failure for each of ``samples``, in order.

        Arguments:
            name: of the reward model.
            together: the model has to see all of them at once; if it fails, they all do.

        Raises:
            PluginError: a process cannot load the run's plugins.
        """
        found = await self._shared(name, list(samples))
        if not isinstance(found, RewardFailure):
            return found
        parts = [list(samples)] if together else [[sample] for sample in samples]
        if len(parts) == 1 and not found.lost:
            return [found] * len(samples)
        again = self._isolated if found.lost else self._shared
        answers = [(part, await again(name, part)) for part in parts]
        return [one for part, answer in answers for one in _each(answer, len(part))]

    async def close(self) -> None:
        """End every process; calls under way fail, and are not asked again."""
        self._is_closed = True
        await asyncio.gather(*(seat.close() for seat in [*self._seats, self._apart]))

    async def _shared(self, name: str, samples: list[Sample]) -> Answers:
        async with self._room:
            seat = min(self._seats, key=lambda seat: seat.num_calls)
            return CLOSED if self._is_closed else await seat.score(name, samples)

    async def _isolated(self, name: str, samples: list[Sample]) -> Answers:
        async with self._alone:
            return CLOSED if self._is_closed else await self._apart.score(name, samples)


class _Seat:
    """One process after the other: a new one where the last has ended, or is stuck and only finishes what it has."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._settings = settings
        self._process: RewardProcess | None = None
        self._starting = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self.num_calls = 0

    async def score(self, name: str, samples: list[Sample]) -> Answers:
        # Counted before the process is there, so that calls which come together spread over all seats.
        self.num_calls += 1
        try:
            return await (await self._ready()).score(name, samples)
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
                self._process = await RewardProcess.start(self._settings)
            return self._process

    async def close(self) -> None:
        async with self._starting:
            if self._process is not None:
                await self._process.end("crash")
            await asyncio.gather(*self._draining)


def _each(answer: Answers, count: int) -> list[Reward | RewardFailure]:
    return [answer] * count if isinstance(answer, RewardFailure) else answer
