"""The pool of reward processes: a reward that hangs, crashes or eats memory fails its own samples and no others.

    shared slots     one process each. A slot gets a call only while its event loop is idle, so no call queues behind
    one
                     that computes or hangs, and calls that wait for a network overlap
    isolated slots   as many again, started once a process has died: each repeats one lost sample at a time, so that
        only
                     the sample at fault fails

N samples that hang therefore take about N / workers time limits. All processes load exactly the driver's plugins. See
:mod:`slime_core.rollout.rewards.process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from slime_core.rollout.rewards.process import Answers, RewardPoolSettings, RewardProcess
from slime_core.types import Reward, RewardFailure, Sample

__all__ = ["RewardPool", "RewardPoolSettings"]

CALLS_PER_PROCESS = 16
"""Calls in flight in one process; more wait in the sampler, where a crash does not lose them."""

CLOSED = RewardFailure("crash", "the processes of reward models were ended before it was scored")


class RewardPool:
    """Starts processes when they are needed, and ends them in :meth:`close`; use it in one event loop."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._scores_each: set[str] = set()
        self._slots, self._isolated_slots = (
            [_Slot(settings, place, self._scores_each) for place in range(settings.num_workers)] for _ in range(2)
        )
        self._free_slots, self._free_isolated = _queue(self._slots), _queue(self._isolated_slots)
        self._room = asyncio.Semaphore(settings.num_workers * CALLS_PER_PROCESS)
        self._is_closed = False

    async def score(self, name: str, samples: Sequence[Sample], *, together: bool) -> list[Reward | RewardFailure]:
        """A reward or a failure for each of ``samples``, in order.

        Arguments:
            name: of the reward model.
            together: the model must get all of them at once; if it fails, they all fail. A model that reports
                ``scores_each`` gets them one by one when they are repeated.

        Raises:
            PluginError: a process cannot load the run's plugins.
        """
        found = await self._score_shared(name, list(samples))
        if not isinstance(found, RewardFailure):
            return found
        whole = together and name not in self._scores_each
        parts = [list(samples)] if whole else [[sample] for sample in samples]
        if len(parts) == 1 and (found.own or not found.lost):
            return [found] * len(samples)
        again = self._score_isolated if found.lost else self._score_shared
        answers = await asyncio.gather(*(again(name, part) for part in parts))
        return [one for part, answer in zip(parts, answers, strict=True) for one in _each(answer, len(part))]

    async def close(self) -> None:
        """End every process; calls in flight fail and are not repeated."""
        self._is_closed = True
        await asyncio.gather(*(slot.close() for slot in [*self._slots, *self._isolated_slots]))

    async def _score_shared(self, name: str, samples: list[Sample]) -> Answers:
        async with self._room:
            _, _, slot = await self._free_slots.get()
            with ExitStack() as turn:
                turn.callback(lambda: self._free_slots.put_nowait(slot.entry))
                return CLOSED if self._is_closed else await slot.score(name, samples, idle=turn.close)

    async def _score_isolated(self, name: str, samples: list[Sample]) -> Answers:
        _, _, slot = await self._free_isolated.get()
        try:
            return CLOSED if self._is_closed else await slot.score(name, samples)
        finally:
            self._free_isolated.put_nowait(slot.entry)


class _Slot:
    """Holds one process; replaces it when it has ended, or when a timed-out call has left something running in it."""

    def __init__(self, settings: RewardPoolSettings, place: int, each: set[str]) -> None:
        self._settings, self._place, self._scores_each = settings, place, each
        self._process: RewardProcess | None = None
        self._starting = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self.num_calls = 0

    @property
    def entry(self) -> _Entry:
        """The slot as a queue entry: fewest calls first, then by place."""
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
                self._process = await RewardProcess.start(self._settings, scores_each=self._scores_each)
            return self._process

    async def close(self) -> None:
        async with self._starting:
            if self._process is not None:
                await self._process.end("crash")
            await asyncio.gather(*self._draining)


_Entry = tuple[int, int, _Slot]


def _queue(slots: Sequence[_Slot]) -> asyncio.PriorityQueue[_Entry]:
    """Idle slots. Each is in the queue once and has its own place, so two slots are never compared."""
    queue: asyncio.PriorityQueue[_Entry] = asyncio.PriorityQueue()
    for slot in slots:
        queue.put_nowait(slot.entry)
    return queue


def _each(answer: Answers, count: int) -> list[Reward | RewardFailure]:
    return [answer] * count if isinstance(answer, RewardFailure) else answer
