"""Waits for calls of actors: each wait has a name, reports late calls, and has a limit.

A silent hang is the most common complaint about distributed training. So after ``warn_after_s`` a wait reports in one
line the progress of its calls, its reasons and its length. If nothing has moved for half of ``fail_after_s``, or the
user sends SIGUSR1 (:func:`stacks_on_request`), it reports the stacks of the actors, read through their control
threads; after ``fail_after_s`` it raises them as an error. An actor that died or raised ends the wait at once, even
while other actors are still working, and so does a background task that failed. Waiting happens in short slices, so
Ctrl-C works.

:class:`Termination` is about SIGTERM, which schedulers send before they end a job: the run saves what it trained, and
ends. The weights belong to a whole number of rollouts while the run waits for the sampler, and only then. So the signal
ends these waits and no other; the loop knows nothing of it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, Self, TypeVar

import ray
from ray.exceptions import RayError

from slime_core.config.schema import WatchConfig
from slime_core.errors import DEATHS, ProcessDied, SlimeError, WaitTimeout
from slime_core.runtime.actors import Call, Ref, Watched, local_error
from slime_core.runtime.progress import Progress

R = TypeVar("R")

WARN_AFTER_S = 60.0
"""Seconds after which a wait is reported first; then again whenever the time waited has doubled."""

LONGEST_SILENCE = 10
"""Reports are at most this many times ``warn_after_s`` apart."""

SHOWN_CALLS = 6
"""Pending calls that one line names."""

FAIL_AFTER_S = 1800.0
"""Seconds after which a wait is an error: longer than a collective's own limit in torch (10 to 30 minutes)."""

SLICE_S = 0.5
"""Longest time in Ray's own code between two looks at the clock and at Ctrl-C."""

STACKS_LIMIT_S = 3.0
"""An actor whose control threads do not answer within this many seconds holds its interpreter, or has not started."""

PROGRESS_LIMIT_S = 1.0
"""An actor that does not say within this many seconds how far it is has unknown progress."""

CAUSE_LIMIT_S = 1.0
"""A server that dies makes its clients fail; within this many seconds either of the two failures may arrive first."""

FETCH_LIMIT_S = 300.0
"""Seconds to copy a finished result from the node that holds it; results are small, data is not copied."""

log = logging.getLogger(__name__)


class Recovery(Protocol):
    """Replaces processes that failed, so that their failure ends no wait. Only the driver's thread uses it."""

    def monitors(self) -> Sequence[Call[object]]:
        """Return the calls whose failure :meth:`accept` may recover."""

    def accept(self, call: Call[object], error: SlimeError) -> bool:
        """Return whether ``call`` is one of :meth:`monitors`; then its process is being replaced.

        Raises:
            SlimeError: the process has been replaced too often.
        """

    def poll(self) -> None:
        """Finish the replacements that are ready; raises as :meth:`accept` does."""


def wait(
    calls: Sequence[Call[R]],
    *,
    what: str,
    also: Sequence[Call[object]] = (),
    recovery: Recovery | None = None,
    check: Callable[[], None] | None = None,
    warn_after_s: float = WARN_AFTER_S,
    fail_after_s: float = FAIL_AFTER_S,
    on_warn: Callable[[str], None] = log.warning,
    on_progress: Callable[[str], None] | None = None,
) -> list[R]:
    """Wait until all ``calls`` have ended; return their results in their order.

    Arguments:
        what: name of the wait, as it reads after "Waiting for".
        also: background calls. If such a call fails, its error ends the wait; if it returns, it is ignored.
        recovery: replaces processes that fail during the wait; without it a failure ends the wait.
        check: called every half second; its error ends the wait.
        warn_after_s: report after this many seconds, and again at 2, 4, 8 times that.
        fail_after_s: give up after this many seconds.
        on_warn: receives each report of a wait in which nothing moves: the pending calls; after half of
            ``fail_after_s``, or on request, the stacks of their actors.
        on_progress: receives each report of a wait that moves; by default ``on_warn`` does.

    Raises:
        SlimeError: the first error of a call.
        RemoteError: a call failed otherwise, or its actor died.
        WaitTimeout: ``fail_after_s`` have passed; lists the pending calls with stacks.
    """
    watch = _Watch(
        what=what,
        warn_after_s=warn_after_s,
        fail_after_s=fail_after_s,
        on_warn=on_warn,
        on_progress=on_progress or on_warn,
    )
    waiting: dict[Ref[Any], Call[object]] = {call.ref: call for call in calls}
    background: dict[Ref[Any], Call[object]] = {call.ref: call for call in also if call.ref not in waiting}
    results: dict[Ref[Any], Any] = {}
    replaced: set[Ref[Any]] = set()
    while waiting:
        if check is not None:
            check()
        replaceable = {} if recovery is None else {call.ref: call for call in recovery.monitors()}
        watched = {ref: call for ref, call in (background | replaceable).items() if ref not in results}
        calls_by_ref = watched | waiting
        for ref in _ready([*watched, *waiting], within_s=watch.slice_s()):
            try:
                results[ref] = _result(calls_by_ref[ref])
            except SlimeError as error:
                if recovery is not None and recovery.accept(calls_by_ref[ref], error):
                    replaced.add(ref)
                    continue
                others = {other: call for other, call in calls_by_ref.items() if other not in {*replaced, ref}}
                _raise_cause(others, recovery, waited_for=waiting.keys() - watched.keys())
                raise
            waiting.pop(ref, None)
        if recovery is not None:
            recovery.poll()
        if waiting:
            watch.look(waiting.values(), finished=len(calls) - len(waiting))
    return [results[call.ref] for call in calls]


def has_ended(call: Call[object]) -> bool:
    """Return at once whether ``call`` has returned or failed."""
    return bool(_ready([call.ref], within_s=0))


class Wait(Protocol):
    """A function that waits for calls, with fixed limits."""

    def __call__(self, calls: Sequence[Call[R]], /, *, what: str, at_least_s: float = 0.0) -> list[R]:
        """Wait for ``calls``, as :func:`wait` does.

        Arguments:
            at_least_s: seconds that the calls may take, if the function's own limit is shorter.
        """


@dataclass(frozen=True, slots=True)
class RunWait:
    """A :class:`Wait` with the limits of a run.

    Arguments:
        limits: when to warn, and when to give up.
        warn: receives the report of a wait that takes long.
        also: lists of background calls whose failure ends any wait, such as engine monitors; calls that are added to
            the lists later count too.
        recovery, check: as in :func:`wait`.
        note: receives the report of a wait that takes long and moves; by default ``warn`` does.
    """

    limits: WatchConfig
    warn: Callable[[str], None]
    also: Sequence[Sequence[Call[object]]] = ()
    recovery: Recovery | None = None
    check: Callable[[], None] | None = None
    note: Callable[[str], None] | None = None

    def __call__(self, calls: Sequence[Call[R]], /, *, what: str, at_least_s: float = 0.0) -> list[R]:
        """Wait for ``calls``, as :func:`wait` does."""
        return wait(
            calls,
            what=what,
            also=[call for background in self.also for call in background],
            recovery=self.recovery,
            check=self.check,
            warn_after_s=self.limits.wait_warn_s,
            fail_after_s=max(self.limits.wait_fail_s, at_least_s),
            on_warn=self.warn,
            on_progress=self.note,
        )


class _Watch:
    def __init__(
        self,
        *,
        what: str,
        warn_after_s: float,
        fail_after_s: float,
        on_warn: Callable[[str], None],
        on_progress: Callable[[str], None],
    ) -> None:
        self.what = what
        self.warn_after_s = warn_after_s
        self.fail_after_s = fail_after_s
        self.on_warn = on_warn
        self.on_progress = on_progress
        self.started_s = time.monotonic()
        self.next_report_s = warn_after_s
        self.num_done: tuple[int, int] | None = None
        self.moved_s = 0.0  # when the number of finished parts was last seen to rise

    def waited_s(self) -> float:
        return time.monotonic() - self.started_s

    def slice_s(self) -> float:
        due_s = min(self.next_report_s, self.fail_after_s) - self.waited_s()
        return max(0.0, min(SLICE_S, due_s))

    def look(self, pending: Iterable[Call[object]], *, finished: int) -> None:
        waited_s = self.waited_s()
        if _stacks_requested.is_set():
            _stacks_requested.clear()
            self.on_warn(self._report(list(pending), finished, with_stacks=True))
            return
        if waited_s < min(self.next_report_s, self.fail_after_s):
            return
        calls = list(pending)
        if waited_s >= self.fail_after_s:
            report = self._report(calls, finished, with_stacks=True)
            raise WaitTimeout(f"{report}\nGave up after {self.fail_after_s:g} s.")
        self.next_report_s = waited_s + min(max(waited_s, self.warn_after_s), LONGEST_SILENCE * self.warn_after_s)
        progress = _collect_progress(calls)
        num_done = (finished, 0 if progress is None else progress.done)
        has_moved = num_done > (self.num_done or (0, 0))
        if has_moved:
            self.num_done, self.moved_s = num_done, waited_s
        stands_still = waited_s - self.moved_s >= self.fail_after_s / 2
        tell = self.on_progress if has_moved else self.on_warn
        tell(self._report(calls, finished, progress=progress, with_stacks=stands_still))

    def _report(
        self, pending: Sequence[Call[object]], finished: int, *, progress: Progress | None = None, with_stacks: bool
    ) -> str:
        """One line about the wait; with stacks, then those of each pending call."""
        waited_s = self.waited_s()
        line = f"Waiting for {self.what} for {waited_s:.0f} s; "
        if progress is not None:
            line += f"{progress}{_time_left(progress, waited_s)}"
        else:
            names = [call.who for call in pending]
            more = f" and {len(names) - SHOWN_CALLS} more" if len(names) > SHOWN_CALLS else ""
            line += f"{finished} done, pending: {', '.join(names[:SHOWN_CALLS])}{more}"
        if not with_stacks:
            return f"{line} (kill -USR1 {os.getpid()} shows what each process does)"
        stacks = _collect_stacks(pending)
        lines = [line]
        for call in pending:
            lines += [f"  {call}", *(f"    {text}" for text in stacks[call.who].splitlines())]
        return "\n".join(lines)


def _time_left(progress: Progress, waited_s: float) -> str:
    """Return an estimate of the remaining time, in proportion to the work done; empty if nothing is done."""
    if not 0 < progress.done < progress.total:
        return ""
    return f", about {waited_s / progress.done * (progress.total - progress.done):.0f} s left"


def _collect_progress(pending: Sequence[Call[object]]) -> Progress | None:
    """Return the progress of the first of these calls that has a known progress."""
    refs = [call.actor.start(Watched.progress).ref for call in pending[:SHOWN_CALLS] if call.actor is not None]
    answered = ray.wait(refs, num_returns=len(refs), timeout=PROGRESS_LIMIT_S)[0] if refs else []
    for ref in answered:
        with suppress(RayError):
            progress: Progress | None = ray.get(ref)
            if progress is not None:
                return progress
    return None


_stacks_requested = threading.Event()


@contextmanager
def stacks_on_request() -> Iterator[None]:
    """Let SIGUSR1 make the current wait, or the next one, report the stacks of its actors."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda *_: _stacks_requested.set())
    try:
        yield
    finally:
        _stacks_requested.clear()
        signal.signal(signal.SIGUSR1, before)


def _ready(refs: list[Ref[Any]], *, within_s: float) -> list[Ref[Any]]:
    # num_returns=1 returns with the first that ends, so a failure is seen while the others still work. Only _result()
    # fetches a result.
    ready, others = ray.wait(refs, num_returns=1, timeout=within_s, fetch_local=False)
    if ready and others:
        # Ranks end together. One look for each of thousands would take the square of their number.
        ready += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[0]
    return ready


def _result(call: Call[R]) -> R:
    try:
        return ray.get(call.ref, timeout=FETCH_LIMIT_S)
    except RayError as error:
        raise local_error(error, who=str(call)) from error


def _raise_cause(others: dict[Ref[Any], Call[object]], recovery: Recovery | None, *, waited_for: Set[Ref[Any]]) -> None:
    """If a call of ``others`` fails within CAUSE_LIMIT_S and is not recovered, raise its error: it is the cause of the
    failure at hand. So the error of a server that died is raised, and not that of its client.

    Arguments:
        waited_for: the calls of ``others`` that belong to the wait itself, such as those of other ranks. They fail
            together; only a rank whose process died is the cause.
    """
    deadline_s = time.monotonic() + CAUSE_LIMIT_S
    while others and (ready := _ready([*others], within_s=max(0.0, deadline_s - time.monotonic()))):
        for ref in ready:
            call = others.pop(ref)
            try:
                _result(call)
            except SlimeError as error:
                is_cause = ref not in waited_for or isinstance(error, ProcessDied)
                if is_cause and (recovery is None or not recovery.accept(call, error)):
                    raise


def _collect_stacks(pending: Sequence[Call[object]]) -> Mapping[str, str]:
    # All at once under one limit: a group of a hundred silent actors must not take a hundred limits.
    started = {call.actor.start(Watched.stacks).ref: call.who for call in pending if call.actor is not None}
    answered = ray.wait(list(started), num_returns=len(started), timeout=STACKS_LIMIT_S)[0] if started else []
    silent = (
        f"no stacks in {STACKS_LIMIT_S:g} s: its constructor has not returned, or native code holds its interpreter"
    )
    return {call.who: silent for call in pending} | {started[ref]: _answer(ref) for ref in answered}


def _answer(ref: Ref[str]) -> str:
    try:
        return ray.get(ref)
    except RayError as error:
        return f"no stacks: {type(error).__name__}"


class Terminated(KeyboardInterrupt):
    """SIGTERM came: the run saves what it trained and ends."""


class Termination:
    """Waits with the first SIGTERM for a moment at which the weights are those after a whole step.

    ``with Termination() as stop:`` handles the signal; ``with stop.allowed():`` is such a moment:

    - The first SIGTERM, inside or before such a block, raises :class:`Terminated` in the block.
    - The death of a process after the first SIGTERM becomes :class:`Terminated` instead of a restart.
    - The second SIGTERM raises ``KeyboardInterrupt`` at once.
    - In a thread other than the main one, where Python handles no signals, nothing changes.
    """

    def __init__(self) -> None:
        self._requested = False
        self._is_allowed = False
        self._is_ending = False
        """The last signal was the first one, and it ends a block."""
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._requested and isinstance(error, DEATHS):
            raise Terminated from error  # instead of a restart

    @contextmanager
    def allowed(self, is_allowed: bool = True) -> Iterator[None]:
        """Let a signal that has come, or comes now, end the block. False: no signal ends it."""
        self._is_allowed = is_allowed
        try:
            if self._requested and is_allowed:
                raise Terminated
            yield
        except KeyboardInterrupt as interrupt:
            # Where the signal comes inside a wait of Ray, Ray catches the error of the handler and raises a bare one.
            if self._is_ending and not isinstance(interrupt, Terminated):
                raise Terminated from None
            raise
        finally:
            self._is_allowed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = self._is_allowed and not self._requested
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        if self._is_allowed:
            raise Terminated
