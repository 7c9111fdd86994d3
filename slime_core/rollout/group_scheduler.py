"""Prompt groups between their data source and the learner: taken, in flight, finished, and handed over to be trained.

    admitted   taken from the source; its task generates and rewards it beside all others
    finished   waits here until a rollout takes it
    due        has to be taken by a rollout now, or it would be older than the bound when another has room for it

How much is generated ahead is a number, not another way of working. With 0, groups are admitted when a rollout asks for
them. With N, as many as N more rollouts need are admitted besides, and go on while the learner trains. No group is
admitted that could not be trained within the bound on staleness, and rollouts take due groups first, so that age is a
matter of pacing and samples that are too old are the exception.

Concurrency: everything runs in one event loop. :meth:`GroupScheduler.take` and :meth:`GroupScheduler.published` admit
groups, and so does a task whose group was aborted by an update of the weights; only tasks mark groups as finished. An
exception of a task is stored, and the next call raises it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from slime_core.errors import RunError
from slime_core.plugins.contracts import DataSource
from slime_core.rollout.async_policy import AsyncPolicy
from slime_core.rollout.prompt_ledger import PendingGroups
from slime_core.rollout.requeue_buffer import sample_ids_by_group
from slime_core.rollout.resumable_groups import copy_sample, dump_group, dump_prompts, load_group, oldest_group_version
from slime_core.types import PromptGroup, Status

__all__ = ["GroupScheduler"]

END_LIMIT_S = 30.0
"""For requests to end that were told to: an engine answers within a second, a reward model within its own limit."""


@dataclass(slots=True, eq=False)
class _Group:
    """One admitted group: what its source gave, the version that was served then, and what became of it."""

    number: int
    given: PromptGroup
    version: int
    made: PromptGroup | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Waits:
    """Seconds that one side had nothing to do because of the other."""

    learner_s: float = 0.0
    engines_s: float = 0.0
    idle_since_s: float | None = None

    def take(self) -> tuple[float, float]:
        taken = self.learner_s, self.engines_s
        self.learner_s = self.engines_s = 0.0
        return taken


class GroupScheduler:
    """Keeps groups in flight; see the module.

    Arguments:
        source: of the prompts.
        prepare: called with the number of a rollout and the groups that are begun for it, before they are.
        make: generates and rewards one group of that rollout.
        pace: how much at once.
        ends: requests end while its context lasts, with the tokens that they have.
    """

    def __init__(
        self,
        source: DataSource,
        *,
        prepare: Callable[[int, list[PromptGroup]], None],
        make: Callable[[int, PromptGroup], Awaitable[PromptGroup]],
        pace: AsyncPolicy,
        ends: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._source, self._prepare, self._make, self._pace = source, prepare, make, pace
        self._ends, self._is_ending = ends, False
        self._served, self._asked, self._needed, self._begun = 0, -1, 0, 0
        self._number = 0
        self._open: list[_Group] = []
        self._finished: list[_Group] = []
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._waits = _Waits()
        self._aborted = 0

    # --- What the sampler asks for -----------------------------------------------------------------------------------

    async def take(self, rollout: int, count: int) -> list[PromptGroup]:
        """``count`` finished groups for ``rollout``, in the order of their admission: those that are due, and besides
        those that were finished first.

        Raises:
            SlimeError: what ended a group, whichever rollout it was begun for.
        """
        self.check()
        begun_s = time.monotonic()
        self._asked, self._needed = rollout, count
        is_short = len(self._open) < count
        self._begun = max(count, self._pace.fetch or 0) if is_short else count
        self._admit()
        while (chosen := self._chosen(rollout, count)) is None:
            self._changed.clear()
            await self._changed.wait()
            self.check()
        self._needed = self._begun = 0
        for group in chosen:
            self._open.remove(group)
            self._finished.remove(group)
        self._waits.learner_s += time.monotonic() - begun_s
        self._note_idleness()
        return [group.made or [] for group in chosen]

    async def settle(self) -> None:
        """What is still in flight is ended, unless generation runs ahead: its groups go back, with what they have.

        A group that is not ended within the limit is cancelled, and goes back as it was given.
        """
        tasks = {group.task: group for group in self._open if group.task is not None and group.made is None}
        if self._pace.ahead or not tasks:
            return
        self._is_ending = True
        try:
            async with self._ends():
                _, late = await asyncio.wait(tasks, timeout=END_LIMIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        finally:
            self._is_ending = False
        # One that has finished all the same is where its end has put it.
        for group in (tasks[task] for task in late if task.cancelled()):
            self._open.remove(group)
            self._source.put_back([group.given])
        self.check()

    async def rest(self) -> None:
        """What was begun has ended when this returns; a publication or another rollout begins what is ahead of it.

        Raises:
            SlimeError: what ended a group.
        """
        while running := [one.task for one in self._open if one.task is not None and not one.task.done()]:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self.check()

    def present(self) -> PendingGroups:
        """The groups that were taken from the source, and not from here."""
        waiting = sample_ids_by_group([group.given for group in self._finished])
        in_flight = sample_ids_by_group([group.given for group in self._open if group.made is None])
        return PendingGroups(in_flight=in_flight, held=waiting)

    def published(self, version: int) -> None:
        """The engines serve ``version``, the number of rollouts that the learner has trained."""
        self.check()
        self._served, self._asked = version, max(self._asked, version - 1)
        self._admit()

    def check(self) -> None:
        """Raise what ended a group, if anything has: that is the end of the run, however often it is asked."""
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """How full the buffer is, and who waited for whom since this was last asked; empty where there is no buffer."""
        learner_s, engines_s = self._waits.take()
        aborted, self._aborted = self._aborted, 0
        if not self._pace.ahead and not self._pace.fetch:
            return {}
        found = {
            "rollout/buffer/finished": float(len(self._finished)),
            "rollout/buffer/in_flight": float(self._in_flight),
            "perf/learner_waited_time": learner_s,
            "perf/engines_waited_time": engines_s,
        }
        return found | ({"rollout/buffer/aborted": float(aborted)} if aborted else {})

    async def close(self) -> None:
        """Nothing is in flight any more when this returns."""
        tasks = [group.task for group in self._open if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- State -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs so that no prompt is lost and none is trained twice, JSON-ready.

        The source's own state; groups in flight as the source gave them, whose prompts it will hand out again; and
        finished groups whole. A group is one text of JSON. A finished group that JSON cannot carry counts as in flight.
        """
        finished = {group.number: dump_group(group.made or [], group.version) for group in self._finished}
        return {
            "source": self._source.state(),
            "in_flight": [
                dump_prompts(group.given, group.version) for group in self._open if finished.get(group.number) is None
            ],
            "finished": [text for text in finished.values() if text is not None],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken; a mapping without ``source`` is that of a source alone."""
        self._source.restore(state.get("source", state))
        if "source" not in state:
            return
        given = [load_group(text) for text in state["in_flight"]]
        if given:
            self._source.put_back([samples for _, samples in given])
        for version, samples in map(load_group, state["finished"]):
            group = _Group(self._next(), samples, version, made=samples)
            self._open.append(group)
            self._finished.append(group)

    # --- Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin as many groups as the pace allows, for the rollouts that will take them."""
        while (room := self._room()) > 0:
            rollout, left = self._planned(len(self._open))
            if self._pace.total is not None and rollout >= max(self._pace.total, self._asked + 1):
                return
            self._begin(rollout, self._source.next_groups(min(room, left)))

    def _room(self) -> int:
        return self._begun + self._ahead() * self._pace.batch - len(self._open)

    def _ahead(self) -> int:
        """Rollouts beyond the one asked for last that may be begun with the weights that are served.

        A group of rollout r that weights v draw is trained by weights r, r - v rollouts later.
        """
        if self._pace.oldest is None:
            return self._pace.ahead
        return max(0, min(self._pace.ahead, self._served + self._pace.oldest - self._asked))

    def _planned(self, place: int) -> tuple[int, int]:
        """The rollout that a group at ``place`` of the open ones is for, and how many places it still has there."""
        if place < self._begun:
            return self._asked, self._begun - place
        rollouts, within = divmod(place - self._begun, self._pace.batch)
        return self._asked + 1 + rollouts, self._pace.batch - within

    def _begin(self, rollout: int, groups: list[PromptGroup]) -> None:
        given = [[copy_sample(sample) for sample in group] for group in groups]
        self._prepare(rollout, groups)
        if self._waits.idle_since_s is not None:
            self._waits.engines_s += time.monotonic() - self._waits.idle_since_s
            self._waits.idle_since_s = None
        for before, samples in zip(given, groups, strict=True):
            group = _Group(self._next(), before, oldest_group_version(samples, self._served))
            self._open.append(group)
            name = f"group {before[0].group_index}"
            group.task = asyncio.create_task(self._run(group, rollout, samples), name=name)
            group.task.add_done_callback(self._ended)

    def _next(self) -> int:
        self._number += 1
        return self._number

    # --- In flight ---------------------------------------------------------------------------------------------------

    async def _run(self, group: _Group, rollout: int, samples: PromptGroup) -> None:
        made = await self._make(rollout, samples)
        if (self._pace.repeats or self._is_ending) and any(sample.status is Status.ABORTED for sample in made):
            self._aborted += 1
            self._open.remove(group)
            self._source.put_back([made])
            self._admit()
            return
        group.made = made
        self._finished.append(group)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            failure = task.exception()  # asked of each: one that nobody asks for is logged when it is collected
            self._failure = self._failure or failure
        elif not task.cancelling():
            self._failure = self._failure or _cancelled(task.get_name())
        self._note_idleness()
        self._changed.set()

    @property
    def _in_flight(self) -> int:
        return len(self._open) - len(self._finished)

    def _note_idleness(self) -> None:
        if not self._in_flight and not self._needed and self._waits.idle_since_s is None:
            self._waits.idle_since_s = time.monotonic()

    def _chosen(self, rollout: int, count: int) -> list[_Group] | None:
        """What ``rollout`` takes; None: it is not there yet.

        Groups of one age have a last rollout that may train them. So many of those that share it or have an earlier one
        are taken now that the rollouts until then have room for the rest; for these the rollout waits. For what is too
        old already, as over-sampling may leave it behind, none does.
        """
        if len(self._finished) < count:
            return None
        chosen: dict[int, _Group] = {}
        counted = [one for one in self._open if one.made is not None or self._last(one) >= rollout]
        for last in sorted({self._last(group) for group in counted} - {math.inf}):
            ready = [one for one in self._finished if self._last(one) <= last and one.number not in chosen]
            within = sum(self._last(one) <= last for one in counted)
            missing = min(count, within - max(0, int(last) - rollout) * self._pace.batch) - len(chosen)
            if missing > len(ready):
                return None
            chosen |= {one.number: one for one in ready[: max(0, missing)]}
        others = [one for one in self._finished if one.number not in chosen]
        chosen |= {one.number: one for one in others[: count - len(chosen)]}
        return [chosen[number] for number in sorted(chosen)]

    def _last(self, group: _Group) -> float:
        """The last rollout that may train ``group``."""
        oldest = self._pace.oldest
        return group.version + oldest if self._pace.waits and oldest is not None else math.inf


def _cancelled(group: str) -> RunError:
    """What ends a run of which a group was cancelled, and not by :class:`GroupScheduler`: it would be waited for."""
    return RunError(
        f"{group} was cancelled from within: its generate function, a hook or a reward raised CancelledError, as "
        "`await task` does of a task that was cancelled. Catch it there, and return the samples as they are."
    )
