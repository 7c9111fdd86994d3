"""Keeps prompt groups in flight between the data source and the learner.

    GroupSource      a source of the groups of a rollout; the sampler calls all sources through it
    GroupScheduler   the default source: admits groups, and hands finished ones to rollouts
    RequeueBuffer    the data source of the run, behind a buffer of aborted groups that are resumed
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
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, fields
from itertools import compress
from operator import attrgetter
from typing import Any, Protocol, cast

from slime_core.config.sampling import RolloutConfig
from slime_core.contracts import DataSource
from slime_core.errors import PluginError, RunError
from slime_core.rollout.collected_rollout import CollectedRollout, oldest_version, stale_weights_error
from slime_core.rollout.routing import RoutedComponent, component_boundary
from slime_core.track.ledger import Journal, PendingGroups
from slime_core.types import PromptGroup, Sample, Status

ABORT_LIMIT_S = 30.0
"""Seconds for aborted requests to return: an engine answers within a second, a reward model within its time limit."""


class GroupWork(Protocol):
    """The work of the scheduler on the groups that it admits."""

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        """Prepare the groups for generation, in place, before their tasks start; return the number of aborted samples
        that restart because of their age."""
        ...

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        """Generate and reward one group."""
        ...

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        """Abort requests while the context lasts: each returns with the tokens that it has."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """One admitted group.

    Arguments:
        number: order of admission.
        prompts: its samples before generation.
        version: oldest weights that sampled, or will sample, a token of it.
        result: its samples, generated and rewarded. None: in flight.
        task: generates it. None: the group was restored from a checkpoint.
    """

    number: int
    prompts: PromptGroup
    version: int
    result: PromptGroup | None = None
    task: asyncio.Task[None] | None = None


class GroupSource:
    """A source of groups; the sampler makes one call at a time, while groups may be in flight. This base class has no
    groups in flight between rollouts.

    Arguments:
        prompts: the data source.
    """

    def __init__(self, prompts: DataSource) -> None:
        self.prompts = prompts

    async def fill(self, batch: CollectedRollout) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout``; return additional metrics of the rollout.

        Raises:
            RunError: too few groups are kept.
            SlimeError: a group failed, or a saved rollout cannot be read.
        """
        raise NotImplementedError

    def published(self, version: int) -> None:
        """Note that the engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: a group has failed.
        """

    async def drain(self) -> None:
        """Wait until no group is in flight, so that an evaluation does not share the engines.

        Raises:
            SlimeError: a group failed.
        """

    @property
    def num_ready(self) -> int:
        """Finished groups that the call of :meth:`fill` has not added to its batch yet."""
        return 0

    def raise_failure(self) -> None:
        """Raise the exception of a group that failed, if any."""

    def pending_groups(self) -> PendingGroups:
        """Return the groups that were taken from the data source and not trained: in flight, finished, or held."""
        return PendingGroups()

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, JSON-ready."""
        return self.prompts.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        self.prompts.restore(state)

    async def close(self) -> None:
        """Cancel groups in flight, and wait for their end."""


MAX_STALE_ROUNDS = 100
"""Consecutive rounds that returned groups which were too old; over-sampling keeps only a few such groups."""


class GroupScheduler(GroupSource):
    """Admits groups, and hands finished ones to rollouts; see the module.

    Arguments:
        prompts: of the run.
        work: prepares, generates and rewards groups.
        settings: bounds of the groups in flight, and the treatment of stale and aborted groups.
    """

    def __init__(self, prompts: RequeueBuffer, work: GroupWork, settings: RolloutConfig) -> None:
        self.prompts: RequeueBuffer = prompts
        self._work = work
        self._settings = settings
        self._served_version = 0
        self._rollout = -1  # the current rollout, or the last one that took its groups
        self._num_awaited = 0  # groups that take() waits for; 0: no call waits
        self._target = 0  # groups to keep admitted for the current rollout; over-sampling admits more than take() needs
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

    async def fill(self, batch: CollectedRollout) -> Mapping[str, float]:
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

    async def _round(self, batch: CollectedRollout, count: int) -> int:
        return batch.receive(await self.take(batch.rollout, count))

    async def take(self, rollout: int, count: int) -> list[PromptGroup]:
        """Return ``count`` finished groups for ``rollout``, in the order of their admission: all groups that are due,
        then those that finished first.

        Raises:
            SlimeError: a group failed, whichever rollout it was admitted for.
        """
        self.raise_failure()
        start_s = time.monotonic()
        self._rollout = rollout
        self._num_awaited = count
        is_short = len(self._admitted) < count
        self._target = max(count, self._settings.over_sampling_batch_size or 0) if is_short else count
        self._admit()
        while (chosen := self._choose(rollout, count)) is None:
            self._changed.clear()
            await self._changed.wait()
            self.raise_failure()
        self._num_awaited = 0
        self._target = 0
        removed = set(chosen)
        self._admitted = [group for group in self._admitted if group not in removed]
        self._finished = [group for group in self._finished if group not in removed]
        self._learner_waited_s += time.monotonic() - start_s
        self._note_idle_engines()
        return [group.result or [] for group in chosen]

    async def abort_in_flight(self) -> None:
        """Abort groups in flight, unless generation runs ahead: they return to the source with their tokens.

        A group that does not return within the limit is cancelled; its prompt returns to the source.
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
            self.prompts.put_back([group.prompts])
        self.raise_failure()

    async def drain(self) -> None:
        """Wait until no group is in flight. The next publication or rollout admits groups again.

        Raises:
            SlimeError: a group failed.
        """
        while running := [task for group in self._admitted if (task := group.task) is not None and not task.done()]:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()

    def pending_groups(self) -> PendingGroups:
        """Return the groups that were taken from the source and that no rollout has taken yet."""
        finished = sample_ids_by_group([group.prompts for group in self._finished])
        in_flight = sample_ids_by_group([group.prompts for group in self._admitted if group.result is None])
        return PendingGroups(in_flight=in_flight, held={**finished, **self.prompts.held})

    def published(self, version: int) -> None:
        """Note that the engines serve ``version``, the number of rollouts that the learner has trained."""
        self.raise_failure()
        self._served_version = version
        # A resumed run publishes before its first take: groups are then admitted for the rollouts that are not trained.
        self._rollout = max(self._rollout, version - 1)
        self._admit()

    @property
    def num_ready(self) -> int:
        """Number of finished groups of a waiting :meth:`take`; groups of later rollouts do not count."""
        return min(len(self._finished), self._num_awaited)

    def raise_failure(self) -> None:
        """Raise the first exception of a task, if any; every later call raises it again."""
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """Return, since the last call, the number of aborted samples that restart because of their age; with a buffer,
        also its size and the time that each side waited."""
        restarted, self._num_restarted = self._num_restarted, 0
        aborted, self._num_aborted = self._num_aborted, 0
        learner_s, self._learner_waited_s = self._learner_waited_s, 0.0
        engines_s, self._engines_waited_s = self._engines_waited_s, 0.0
        metrics = {"rollout/staleness/begun_anew": float(restarted)} if restarted else {}
        if not self._settings.async_buffer_size and not self._settings.over_sampling_batch_size:
            return metrics
        metrics |= {
            "rollout/buffer/finished": float(len(self._finished)),
            "rollout/buffer/in_flight": float(self._num_in_flight),
            "perf/learner_waited_time": learner_s,
            "perf/engines_waited_time": engines_s,
        }
        return metrics | ({"rollout/buffer/aborted": float(aborted)} if aborted else {})

    async def close(self) -> None:
        """Cancel every task, and wait for it."""
        tasks = [group.task for group in self._admitted if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- State -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, JSON-ready: no prompt is lost and none is trained twice.

        The state holds the source's state, the prompts of groups in flight (a resumed run generates them again), and
        finished groups with their responses. Each group is one JSON text. A finished group that JSON cannot represent
        is saved like a group in flight.
        """
        finished = {group.number: dump_group(group.result or [], group.version) for group in self._finished}
        in_flight = [group for group in self._admitted if finished.get(group.number) is None]
        return {
            "source": self.prompts.state(),
            "in_flight": [dump_prompts(group.prompts, group.version) for group in in_flight],
            "finished": [text for text in finished.values() if text is not None],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned; a mapping without ``source`` is the state of a source."""
        self.prompts.restore(state.get("source", state))
        if "source" not in state:
            return
        in_flight = [load_group(text)[1] for text in state["in_flight"]]
        if in_flight:
            self.prompts.put_back(in_flight)
        for version, samples in map(load_group, state["finished"]):
            group = _Group(self._next_number(), samples, version, result=samples)
            self._admitted.append(group)
            self._finished.append(group)

    # --- Admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start as many groups as the settings allow, each for the rollout that will take it."""
        while (capacity := self._capacity()) > 0:
            rollout, room = self._assign_rollout(len(self._admitted))
            if rollout >= max(self._settings.num_rollout, self._rollout + 1):
                return
            self._start(rollout, self.prompts.next_groups(min(capacity, room)))

    def _capacity(self) -> int:
        return self._target + self._rollouts_ahead() * self._settings.rollout_batch_size - len(self._admitted)

    def _rollouts_ahead(self) -> int:
        """Return the number of rollouts after the current one for which the served weights are new enough.

        Weights v sample a group of rollout r, and weights r train it: the group is then r - v rollouts stale.
        """
        ahead, max_staleness = self._settings.async_buffer_size, self._settings.max_staleness
        if max_staleness is None:
            return ahead
        return max(0, min(ahead, self._served_version + max_staleness - self._rollout))

    def _assign_rollout(self, place: int) -> tuple[int, int]:
        """Return the rollout of the admitted group at ``place``, and the number of places from there on."""
        if place < self._target:
            return self._rollout, self._target - place
        rollouts, within = divmod(place - self._target, self._settings.rollout_batch_size)
        return self._rollout + 1 + rollouts, self._settings.rollout_batch_size - within

    def _start(self, rollout: int, groups: list[PromptGroup]) -> None:
        # Generate functions change samples in place; a checkpoint needs them as they were before.
        prompts = [[copy_sample(sample) for sample in group] for group in groups]
        self._num_restarted += self._work.prepare(rollout, groups)
        if self._engines_idle_since_s is not None:
            self._engines_waited_s += time.monotonic() - self._engines_idle_since_s
            self._engines_idle_since_s = None
        for before, samples in zip(prompts, groups, strict=True):
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
        if not self._num_in_flight and not self._num_awaited and self._engines_idle_since_s is None:
            self._engines_idle_since_s = time.monotonic()

    def _choose(self, rollout: int, count: int) -> list[_Group] | None:
        """Return the groups that ``rollout`` takes, or None if they have not finished yet.

        Groups of one version share a last rollout that may train them. Among the groups with that last rollout or an
        earlier one, ``rollout`` takes as many as the rollouts until then have no room for, and waits for them. It does
        not wait for groups that are already too old, which over-sampling may have kept.
        """
        if len(self._finished) < count:
            return None
        chosen: dict[int, _Group] = {}
        eligible = [
            group for group in self._admitted if group.result is not None or self._last_rollout(group) >= rollout
        ]
        for last in sorted({self._last_rollout(group) for group in eligible} - {math.inf}):
            ready = [
                group for group in self._finished if self._last_rollout(group) <= last and group.number not in chosen
            ]
            within = sum(self._last_rollout(group) <= last for group in eligible)
            room_later = max(0, int(last) - rollout) * self._settings.rollout_batch_size
            missing = min(count, within - room_later) - len(chosen)
            if missing > len(ready):
                return None
            chosen |= {group.number: group for group in ready[: max(0, missing)]}
        others = [group for group in self._finished if group.number not in chosen]
        chosen |= {group.number: group for group in others[: count - len(chosen)]}
        return [chosen[number] for number in sorted(chosen)]

    def _last_rollout(self, group: _Group) -> float:
        """Return the last rollout that may train ``group``."""
        max_staleness = self._settings.max_staleness
        if self._settings.stale_samples == "correct" or max_staleness is None:
            return math.inf
        return group.version + max_staleness


def _cancellation_error(group: str) -> RunError:
    """Return the error for a task that the scheduler did not cancel; without it, ``take`` would wait forever."""
    return RunError(
        f"{group} was cancelled: its generate function, a hook or a reward raised CancelledError, as `await task` does "
        "if that task was cancelled. Catch it there, and return the samples unchanged."
    )


HELD, PROMPTS, SOURCE = "held", "left", "source"


class RequeueBuffer(DataSource):
    """The data source of the run, behind a buffer of aborted groups with tokens, which come first.

    Every method raises ``PluginError`` if the plugin's data source fails.

    Arguments:
        source: the data source.
        journal: records groups that are taken and put back.
        holds: hold aborted groups with tokens (``partial_rollout``); False: put them back into the source.
    """

    def __init__(self, source: RoutedComponent, journal: Journal, *, holds: bool = False) -> None:
        self._name = source.name
        self._plugin = source.plugin
        self._source: DataSource = source.component
        self._journal = journal
        self._holds = holds
        self._held: list[PromptGroup] = []

    @property
    def held(self) -> dict[int, list[int]]:
        """The groups that are held: number -> numbers of its samples."""
        return sample_ids_by_group(self._held)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` groups: first the held groups, with the tokens that they have."""
        held, self._held = self._held[:n], self._held[n:]
        fresh = self._fresh(n - len(held)) if n > len(held) else []
        if fresh:
            self._journal.took(sample_ids_by_group(fresh))
        return [*held, *fresh]

    def _fresh(self, n: int) -> list[PromptGroup]:
        with self._guarded("next_groups"):
            groups: Any = self._source.next_groups(n)
        if not isinstance(groups, list | tuple) or len(groups) != n or not all(map(_is_group, groups)):
            raise PluginError(
                f"{self._plugin}: data source {self._name!r}: next_groups({n}) returned {groups!r:.80}; accepted: a "
                f"list of {n} groups, each a list of at least one Sample.\nCorrect {self._plugin.distribution}."
            )
        return list(groups)

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hold aborted groups with tokens, and put the others back into the source."""
        holds = [self._holds and _is_resumable(group) for group in groups]
        self._held += compress(groups, holds)
        self._return([group for group, is_held in zip(groups, holds, strict=True) if not is_held])

    def _return(self, groups: list[PromptGroup]) -> None:
        if groups:
            self._journal.gave_back(sample_ids_by_group(groups))
            with self._guarded("put_back"):
                self._source.put_back(groups)

    def state(self) -> dict[str, Any]:
        """Return the state of the source, and the held groups, each as one text.

        A group that JSON cannot represent is saved as its prompt, which is generated again.
        """
        with self._guarded("state"):
            state = self._source.state()
        if not self._held:
            return state
        texts = [dump_group(group, 0) for group in self._held]
        prompts = [dump_prompts(group, 0) for group, text in zip(self._held, texts, strict=True) if text is None]
        return {HELD: [text for text in texts if text is not None], PROMPTS: prompts, SOURCE: state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        has_held = state.keys() == {HELD, PROMPTS, SOURCE}
        with self._guarded("restore"):
            self._source.restore(state[SOURCE] if has_held else state)
        self._held = [load_group(text)[1] for text in state[HELD]] if has_held else []
        self._return([load_group(text)[1] for text in state[PROMPTS]] if has_held else [])

    def __len__(self) -> int:
        """Prompts of one pass, for functions by path; raises ``PluginError`` if the source is endless."""
        with self._guarded("__len__"):
            return len(cast(Sized, self._source))

    def _guarded(self, method: str) -> AbstractContextManager[None]:
        return component_boundary(self._plugin, f"data source {self._name!r}: {method}")


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and bool(group) and all(isinstance(sample, Sample) for sample in group)


def sample_ids_by_group(groups: Sequence[PromptGroup]) -> dict[int, list[int]]:
    """Return number of a group -> numbers of its samples; groups and samples without a number are left out."""
    ids: dict[int, list[int]] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.group_index is not None:
            ids.setdefault(sample.group_index, []).extend([] if sample.index is None else [sample.index])
    return ids


def _is_resumable(group: PromptGroup) -> bool:
    was_ended = any(sample.status is Status.ABORTED for sample in group)
    return was_ended and any(sample.response_length for sample in group)


FIELDS = attrgetter(*(field.name for field in fields(Sample)))
"""From a sample to the values of its fields, in the order of its arguments."""

FIXED = frozenset({type(None), bool, int, float, str, Status})
"""Immutable types, which need no copy."""


def copy_sample(sample: Sample) -> Sample:
    """Return a copy of ``sample`` and its containers, because generate functions change samples in place."""
    return Sample(*[value if type(value) in FIXED else copy.copy(value) for value in FIELDS(sample)])


def dump_group(samples: PromptGroup, version: int) -> str | None:
    """Return a finished group as JSON, with the oldest version of its weights, or None if JSON cannot represent it."""
    try:
        return json.dumps({"version": version, "samples": [sample.to_dict() for sample in samples]})
    except (TypeError, ValueError):
        return None


def dump_prompts(samples: PromptGroup, version: int) -> str:
    """Return a pending group as JSON, without values that JSON cannot represent; its number identifies the prompt."""
    rows = [{name: value for name, value in sample.to_dict().items() if _is_json(value)} for sample in samples]
    return json.dumps({"version": version, "samples": rows})


def load_group(text: str) -> tuple[int, PromptGroup]:
    """Return the oldest version of the weights that sampled a token of the group, and its samples."""
    group = json.loads(text)
    samples = [Sample.from_dict(values) for values in group["samples"]]
    return oldest_group_version(samples, group["version"]), samples


def oldest_group_version(samples: PromptGroup, served: int) -> int:
    """Return the oldest version that sampled, or will sample, a token of a group that starts with ``served``."""
    return min([served, *(oldest for oldest in map(oldest_version, samples) if oldest is not None)])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
