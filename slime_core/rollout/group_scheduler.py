"""Keeps prompt groups in flight between the data source and the learner.

    GroupSource      where the groups of a rollout come from; the sampler calls all sources through it
    GroupScheduler   the default source: admits groups, and hands finished ones to rollouts
    RequeueBuffer    the data source of the run, preceded by aborted groups that are resumed
    dump_group, dump_prompts, load_group   a group as JSON text, for checkpoints

A group is

    admitted   taken from the source; an asyncio task generates and rewards the group
    finished   generated and rewarded; waits here until a rollout takes it
    due        must be taken by the current rollout: later rollouts that may still train it are already full

How far generation runs ahead is a number, not a mode. With ``async_buffer_size=0``, groups are admitted when a rollout
requests them. With N, groups for N more rollouts are admitted as well and stay in flight while the learner trains. The
scheduler admits no group that could not be trained within ``max_staleness``, and rollouts take due groups first, so
groups that are too old are the exception.

Concurrency: everything runs in one event loop. :meth:`GroupScheduler.take` and :meth:`GroupScheduler.published` admit
groups, and so does a task whose group was aborted by an update of the weights; only tasks mark groups as finished. An
exception of a task is stored, and the next call raises it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from itertools import compress
from operator import attrgetter
from typing import Any, Protocol, cast

from slime_core.config.sampling import RolloutConfig
from slime_core.contracts import DataSource
from slime_core.errors import RunError
from slime_core.rollout.rollout_batch import RolloutBatch, oldest_version, stale_weights_error
from slime_core.track.ledger import Journal, PendingGroups
from slime_core.types import PromptGroup, Sample, Status

ABORT_LIMIT_S = 30.0
"""Seconds for aborted requests to return: an engine answers within a second, a reward model within its own limit."""


class GroupWork(Protocol):
    """What the scheduler does with the groups that it admits."""

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        """Make the groups ready to be generated, in place, before their tasks start; returns how many aborted samples
        restart because of their age."""
        ...

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        """Generate and reward one group."""
        ...

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        """While the context lasts, every request returns with the tokens that it has."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """One admitted group.

    Arguments:
        number: order of admission.
        given: its samples as the source gave them.
        version: oldest weights that sampled, or will sample, a token of it.
        result: its samples, generated and rewarded; None: in flight.
        task: generates it; None: it was restored from a checkpoint.
    """

    number: int
    given: PromptGroup
    version: int
    result: PromptGroup | None = None
    task: asyncio.Task[None] | None = None


class GroupSource:
    """A source of groups as the sampler calls it: one call at a time, while groups may be in flight. This base class
    has none in flight between rollouts.

    Attributes:
        prompts: the data source that prompts are taken from and put back to.
        is_replay: rollouts are read from files of another run: the sampler then writes no samples and measures no
            throughput.
    """

    prompts: DataSource
    is_replay = False

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout``; returns additional metrics of the rollout.

        Raises:
            RunError: too few groups are kept.
            SlimeError: a group failed, or a saved rollout cannot be read.
        """
        raise NotImplementedError

    def published(self, version: int) -> None:
        """The engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: a group has failed.
        """

    async def drain(self) -> None:
        """Wait until no group is in flight, so that an evaluation has the engines to itself.

        Raises:
            SlimeError: a group failed.
        """

    @property
    def num_ready(self) -> int:
        """Finished groups that the call of :meth:`fill` has not added to its batch yet."""
        return 0

    def raise_failure(self) -> None:
        """Raise the exception of a group that failed, if there is one."""

    def pending_groups(self) -> PendingGroups:
        """The groups that were taken from the data source and not trained: in flight, finished, or held."""
        return PendingGroups()

    def state(self) -> dict[str, Any]:
        """The state that :meth:`restore` needs, JSON-ready."""
        return self.prompts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken."""
        self.prompts.restore(state)

    async def close(self) -> None:
        """Cancel what is in flight, and wait for it."""


MAX_STALE_ROUNDS = 100
"""Consecutive rounds that returned groups which were too old; over-sampling keeps only a few such groups."""


class GroupScheduler(GroupSource):
    """Admits groups, and hands finished ones to rollouts; see the module.

    Arguments:
        prompts: of the run.
        work: prepares, generates and rewards groups.
        settings: how many groups may be in flight, and what becomes of those that are stale or aborted.
    """

    def __init__(self, prompts: RequeueBuffer, work: GroupWork, settings: RolloutConfig) -> None:
        self.prompts: RequeueBuffer = prompts
        self._work = work
        self._settings = settings
        self._served_version = 0
        self._rollout = -1  # the current rollout, or the last one that took its groups
        self._wanted = 0  # groups that take() waits for; 0: no call waits
        self._target = 0  # groups to keep admitted for the current rollout; over-sampling makes it more than wanted
        self._number = 0
        self._admitted: list[_Group] = []  # in flight and finished, in the order of admission
        self._finished: list[_Group] = []  # in the order of finishing
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()  # a task is done
        self._learner_waited_s = 0.0
        self._engines_waited_s = 0.0
        self._engines_idle_since_s: float | None = None
        self._is_aborting = False
        self._num_aborted = 0
        self._num_restarted = 0  # aborted samples whose tokens were too old to be resumed

    # --- Called by the sampler ---------------------------------------------------------------------------------------

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add groups until the batch has enough. Groups that transforms drop are replaced (dynamic sampling, DAPO
        2503.14476, section 3.2) in at most ``rollout_max_refills`` rounds. Groups that are too old, which over-sampling
        has kept, are always replaced: their age is not a property of the prompts.

        Raises:
            RunError: too few groups are kept.
            SlimeError: a group failed, whichever rollout it was admitted for.
        """
        max_refills = self._settings.rollout_max_refills
        num_stale, stale_rounds = await self._round(batch, batch.missing), 0
        while batch.missing and (num_stale or batch.refills < max_refills):
            batch.refills += not num_stale
            stale_rounds = stale_rounds + 1 if num_stale else 0
            if stale_rounds > MAX_STALE_ROUNDS:
                raise stale_weights_error(batch.stale, rollout=batch.rollout)
            num_stale = await self._round(batch, min(batch.missing, num_stale) or batch.missing)
        await self.abort_in_flight()
        if batch.missing and max_refills:
            raise RunError(f"rollout {batch.rollout}: {batch.shortage(max_refills)}")
        return self.metrics()

    async def _round(self, batch: RolloutBatch, count: int) -> int:
        return batch.receive(await self.take(batch.rollout, count))

    async def take(self, rollout: int, count: int) -> list[PromptGroup]:
        """``count`` finished groups for ``rollout``, in the order of their admission: all that are due, then those that
        finished first.

        Raises:
            SlimeError: a group failed, whichever rollout it was admitted for.
        """
        self.raise_failure()
        start_s = time.monotonic()
        self._rollout = rollout
        self._wanted = count
        is_short = len(self._admitted) < count
        self._target = max(count, self._settings.over_sampling_batch_size or 0) if is_short else count
        self._admit()
        while (chosen := self._choose(rollout, count)) is None:
            self._changed.clear()
            await self._changed.wait()
            self.raise_failure()
        self._wanted = 0
        self._target = 0
        taken = set(chosen)
        self._admitted = [group for group in self._admitted if group not in taken]
        self._finished = [group for group in self._finished if group not in taken]
        self._learner_waited_s += time.monotonic() - start_s
        self._note_idle_engines()
        return [group.result or [] for group in chosen]

    async def abort_in_flight(self) -> None:
        """Abort what is still in flight, unless generation runs ahead: the groups return to the source with the tokens
        that they have.

        A group that does not return within the limit is cancelled, and returns to the source as it was given.
        """
        tasks = {group.task: group for group in self._admitted if group.task is not None and group.result is None}
        if self._settings.async_buffer_size or not tasks:
            return
        self._is_aborting = True
        try:
            async with self._work.abort_requests():
                _, late = await asyncio.wait(tasks, timeout=ABORT_LIMIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        finally:
            self._is_aborting = False
        # A late task may have finished before it was cancelled: its group is then finished or requeued already.
        for group in (tasks[task] for task in late if task.cancelled()):
            self._admitted.remove(group)
            self.prompts.put_back([group.given])
        self.raise_failure()

    async def drain(self) -> None:
        """Wait until no group is in flight. The next publication or rollout admits groups again.

        Raises:
            SlimeError: a group failed.
        """
        while running := [one.task for one in self._admitted if one.task is not None and not one.task.done()]:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()

    def pending_groups(self) -> PendingGroups:
        """The groups that were taken from the source and that no rollout has taken yet."""
        finished = sample_ids_by_group([group.given for group in self._finished])
        in_flight = sample_ids_by_group([group.given for group in self._admitted if group.result is None])
        return PendingGroups(in_flight=in_flight, held={**finished, **self.prompts.held})

    def published(self, version: int) -> None:
        """The engines serve ``version``, the number of rollouts that the learner has trained."""
        self.raise_failure()
        self._served_version = version
        # A resumed run publishes before its first take: groups are then admitted for the rollouts that are not trained.
        self._rollout = max(self._rollout, version - 1)
        self._admit()

    @property
    def num_ready(self) -> int:
        """Finished groups for which :meth:`take` waits with others; those of later rollouts do not count."""
        return min(len(self._finished), self._wanted)

    def raise_failure(self) -> None:
        """Raise the first exception of a task, if there is one; every later call raises it again."""
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """Since the last call: aborted samples that restart because of their age; where there is a buffer, how full it
        is, and which side waited."""
        restarted, self._num_restarted = self._num_restarted, 0
        aborted, self._num_aborted = self._num_aborted, 0
        learner_s, self._learner_waited_s = self._learner_waited_s, 0.0
        engines_s, self._engines_waited_s = self._engines_waited_s, 0.0
        found = {"rollout/staleness/begun_anew": float(restarted)} if restarted else {}
        if not self._settings.async_buffer_size and not self._settings.over_sampling_batch_size:
            return found
        found |= {
            "rollout/buffer/finished": float(len(self._finished)),
            "rollout/buffer/in_flight": float(self._num_in_flight),
            "perf/learner_waited_time": learner_s,
            "perf/engines_waited_time": engines_s,
        }
        return found | ({"rollout/buffer/aborted": float(aborted)} if aborted else {})

    async def close(self) -> None:
        """Cancel every task, and wait for it."""
        tasks = [group.task for group in self._admitted if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- State -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs so that no prompt is lost and none is trained twice, JSON-ready.

        It holds the source's own state, groups in flight as the source gave them (a resumed run generates them again),
        and finished groups whole. Each group is one JSON text. A finished group that JSON cannot represent is saved
        like one in flight.
        """
        finished = {group.number: dump_group(group.result or [], group.version) for group in self._finished}
        in_flight = [group for group in self._admitted if finished.get(group.number) is None]
        return {
            "source": self.prompts.state(),
            "in_flight": [dump_prompts(group.given, group.version) for group in in_flight],
            "finished": [text for text in finished.values() if text is not None],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken; a mapping without ``source`` is the state of a source alone."""
        self.prompts.restore(state.get("source", state))
        if "source" not in state:
            return
        given = [load_group(text) for text in state["in_flight"]]
        if given:
            self.prompts.put_back([samples for _, samples in given])
        for version, samples in map(load_group, state["finished"]):
            group = _Group(self._next_number(), samples, version, result=samples)
            self._admitted.append(group)
            self._finished.append(group)

    # --- Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start as many groups as the settings allow, each for the rollout that will take it."""
        while (capacity := self._capacity()) > 0:
            rollout, left = self._assign_rollout(len(self._admitted))
            if rollout >= max(self._settings.num_rollout, self._rollout + 1):
                return
            self._start(rollout, self.prompts.next_groups(min(capacity, left)))

    def _capacity(self) -> int:
        return self._target + self._rollouts_ahead() * self._settings.rollout_batch_size - len(self._admitted)

    def _rollouts_ahead(self) -> int:
        """Rollouts beyond the current one for which the served weights are new enough.

        Weights v sample a group of rollout r, and weights r train it: the group is then r - v rollouts stale.
        """
        ahead, max_staleness = self._settings.async_buffer_size, self._settings.max_staleness
        if max_staleness is None:
            return ahead
        return max(0, min(ahead, self._served_version + max_staleness - self._rollout))

    def _assign_rollout(self, place: int) -> tuple[int, int]:
        """The rollout of the group at ``place`` of the admitted ones, and the places that it still has from there."""
        if place < self._target:
            return self._rollout, self._target - place
        rollouts, within = divmod(place - self._target, self._settings.rollout_batch_size)
        return self._rollout + 1 + rollouts, self._settings.rollout_batch_size - within

    def _start(self, rollout: int, groups: list[PromptGroup]) -> None:
        # Generate functions change samples in place; a checkpoint needs them as the source gave them.
        given = [[copy_sample(sample) for sample in group] for group in groups]
        self._num_restarted += self._work.prepare(rollout, groups)
        if self._engines_idle_since_s is not None:
            self._engines_waited_s += time.monotonic() - self._engines_idle_since_s
            self._engines_idle_since_s = None
        for before, samples in zip(given, groups, strict=True):
            group = _Group(self._next_number(), before, oldest_group_version(samples, self._served_version))
            self._admitted.append(group)
            name = f"group {before[0].group_index}"
            group.task = asyncio.create_task(self._run(group, rollout, samples), name=name)
            group.task.add_done_callback(self._on_done)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    # --- In flight ---------------------------------------------------------------------------------------------------

    async def _run(self, group: _Group, rollout: int, samples: PromptGroup) -> None:
        result = await self._work.run(rollout, samples)
        is_aborted = any(sample.status is Status.ABORTED for sample in result)
        if is_aborted and (self._settings.pause_generation_mode == "abort" or self._is_aborting):
            self._num_aborted += 1
            self._admitted.remove(group)
            self.prompts.put_back([result])
            self._admit()
            return
        group.result = result
        self._finished.append(group)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            failure = task.exception()  # always read: asyncio logs an exception that was never retrieved
            self._failure = self._failure or failure
        elif not task.cancelling():
            self._failure = self._failure or _cancellation_error(task.get_name())
        self._note_idle_engines()
        self._changed.set()

    @property
    def _num_in_flight(self) -> int:
        return len(self._admitted) - len(self._finished)

    def _note_idle_engines(self) -> None:
        if not self._num_in_flight and not self._wanted and self._engines_idle_since_s is None:
            self._engines_idle_since_s = time.monotonic()

    def _choose(self, rollout: int, count: int) -> list[_Group] | None:
        """The groups that ``rollout`` takes; None: they have not finished yet.

        Groups of one version share a last rollout that may train them. Among the groups with that last rollout or an
        earlier one, ``rollout`` takes as many as the rollouts until then have no room for, and waits for them. It does
        not wait for groups that are too old already, which over-sampling may have kept.
        """
        if len(self._finished) < count:
            return None
        chosen: dict[int, _Group] = {}
        counted = [one for one in self._admitted if one.result is not None or self._last_rollout(one) >= rollout]
        for last in sorted({self._last_rollout(group) for group in counted} - {math.inf}):
            ready = [one for one in self._finished if self._last_rollout(one) <= last and one.number not in chosen]
            within = sum(self._last_rollout(one) <= last for one in counted)
            room_later = max(0, int(last) - rollout) * self._settings.rollout_batch_size
            missing = min(count, within - room_later) - len(chosen)
            if missing > len(ready):
                return None
            chosen |= {one.number: one for one in ready[: max(0, missing)]}
        others = [one for one in self._finished if one.number not in chosen]
        chosen |= {one.number: one for one in others[: count - len(chosen)]}
        return [chosen[number] for number in sorted(chosen)]

    def _last_rollout(self, group: _Group) -> float:
        """The last rollout that may train ``group``."""
        max_staleness = self._settings.max_staleness
        if self._settings.stale_samples == "correct" or max_staleness is None:
            return math.inf
        return group.version + max_staleness


def _cancellation_error(group: str) -> RunError:
    """The error for a task that was cancelled, but not by the scheduler: without it, ``take`` would wait forever."""
    return RunError(
        f"{group} was cancelled from within: its generate function, a hook or a reward raised CancelledError, as "
        "`await task` does of a task that was cancelled. Catch it there, and return the samples as they are."
    )


HELD, LEFT, SOURCE = "held", "left", "source"


class RequeueBuffer(DataSource):
    """A data source with a buffer before it: aborted groups with tokens are held and come first.

    Arguments:
        source: of the prompts.
        journal: records which groups are taken and put back.
        holds: aborted groups with tokens are held (``partial_rollout``); False: they go back to the source.
    """

    def __init__(self, source: DataSource, journal: Journal, *, holds: bool = False) -> None:
        self._source = source
        self._journal = journal
        self._holds = holds
        self._held: list[PromptGroup] = []

    @property
    def held(self) -> dict[int, list[int]]:
        """The groups that are held: number -> numbers of its samples."""
        return sample_ids_by_group(self._held)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that are held first, with the tokens that they have."""
        held, self._held = self._held[:n], self._held[n:]
        fresh = self._source.next_groups(n - len(held)) if n > len(held) else []
        if fresh:
            self._journal.took(sample_ids_by_group(fresh))
        return [*held, *fresh]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hold aborted groups with tokens, and put the others back into the source."""
        holds = [self._holds and _is_resumable(group) for group in groups]
        self._held += compress(groups, holds)
        others = [group for group, is_held in zip(groups, holds, strict=True) if not is_held]
        if others:
            self._journal.gave_back(sample_ids_by_group(others))
            self._source.put_back(others)

    def state(self) -> dict[str, Any]:
        """The state of the source, and the groups that are held, each as one text.

        A group that JSON cannot represent is saved as its prompt, which is generated again.
        """
        state = self._source.state()
        if not self._held:
            return state
        texts = [dump_group(group, 0) for group in self._held]
        left = [dump_prompts(group, 0) for group, text in zip(self._held, texts, strict=True) if text is None]
        return {HELD: [text for text in texts if text is not None], LEFT: left, SOURCE: state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        if state.keys() != {HELD, LEFT, SOURCE}:
            self._held = []
            self._source.restore(state)
            return
        self._source.restore(state[SOURCE])
        self._held = [load_group(text)[1] for text in state[HELD]]
        again = [load_group(text)[1] for text in state[LEFT]]
        if again:
            self._journal.gave_back(sample_ids_by_group(again))
            self._source.put_back(again)

    def __len__(self) -> int:
        return len(cast(Sized, self._source))


def sample_ids_by_group(groups: Sequence[PromptGroup]) -> dict[int, list[int]]:
    """Number of a group -> the numbers of its samples; groups and samples without a number are left out."""
    found: dict[int, list[int]] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.group_index is not None:
            found.setdefault(sample.group_index, []).extend([] if sample.index is None else [sample.index])
    return found


def _is_resumable(group: PromptGroup) -> bool:
    was_ended = any(sample.status is Status.ABORTED for sample in group)
    return was_ended and any(sample.response_length for sample in group)


FIELDS = attrgetter(*(one.name for one in fields(Sample)))
"""From a sample to the values of its fields, in the order of its arguments."""

FIXED = frozenset({type(None), bool, int, float, str, Status})
"""Types of values that nothing can change, so that no copy is needed."""


def copy_sample(sample: Sample) -> Sample:
    """A copy of ``sample`` and its containers, which a generate function may change in place without changing it."""
    return Sample(*[value if type(value) in FIXED else copy.copy(value) for value in FIELDS(sample)])


def dump_group(samples: PromptGroup, version: int) -> str | None:
    """A finished group as JSON, with the oldest version of its weights; None: JSON cannot represent a value of it."""
    try:
        return json.dumps({"version": version, "samples": [sample.to_dict() for sample in samples]})
    except (TypeError, ValueError):
        return None


def dump_prompts(given: PromptGroup, version: int) -> str:
    """A group as its source gave it, without values that JSON cannot represent; its number identifies the prompt."""
    rows = [{name: value for name, value in one.to_dict().items() if _is_json(value)} for one in given]
    return json.dumps({"version": version, "samples": rows})


def load_group(text: str) -> tuple[int, PromptGroup]:
    """The oldest version of the weights that sampled a token of the group, and its samples."""
    found = json.loads(text)
    samples = [Sample.from_dict(values) for values in found["samples"]]
    return oldest_group_version(samples, found["version"]), samples


def oldest_group_version(samples: PromptGroup, served: int) -> int:
    """The oldest version that sampled, or will sample, a token of a group that starts while ``served`` is served."""
    return min([served, *(oldest for oldest in map(oldest_version, samples) if oldest is not None)])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
