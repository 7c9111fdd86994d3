"""The pool of reward processes: a reward that hangs, crashes or eats memory fails its own samples and no others.

    RewardPool      chooses the process of each call
    RewardProcess   one process, seen from the sampler: its socket, its calls in flight, and its end

:mod:`slime_core.rollout.reward_worker` is the program of a process.

Every call gets an answer, whatever the process does. A call times out inside the process, unless it holds the
interpreter; then, or over the memory limit, the sampler kills the process. All processes load exactly the driver's
plugins.

The pool has two kinds of slots, with one process each. A shared slot gets a call only while its event loop is idle: no
call waits for one that computes or hangs, and calls that wait for a network overlap. Isolated slots, as many again,
start once a process has died: each repeats one lost sample at a time, so that only the sample at fault fails. N samples
that hang therefore take about N / workers time limits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]

from slime_core.config.secrets import (
    PASS_ENV,
    PROXIES,
    engine_access,
    named_variables,
    needed_environment,
)
from slime_core.errors import PluginError, RunError
from slime_core.rollout.reward_worker import RewardPoolSettings, read_frame, write_frame
from slime_core.runtime.supervisor import die_with
from slime_core.types import Reward, RewardFailure, Sample
from slime_core.user_code.failures import boundary

POLL_S = 0.1
"""Seconds between two checks of the process."""

GRACE_S = 1.0
"""Seconds beyond the time limit in which a waiting call ends by itself."""

START_LIMIT_S = 120.0
"""A reward may import a library that takes a minute on a busy machine."""

END_GRACE_S = 10.0
"""Seconds after SIGTERM in which a process ends its children; after SIGKILL it could not."""


Answers = list[Reward | RewardFailure] | RewardFailure
"""One for each sample of a call, or why the whole call failed."""


@dataclass(slots=True, eq=False)
class _Call:
    answer: asyncio.Future[dict[str, Any]]
    idle: Callable[[], None] | None
    sent_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None


class RewardProcess:
    """Made by :meth:`start`; belongs to one event loop."""

    def __init__(self, settings: RewardPoolSettings, process: subprocess.Popen[bytes], scores_each: set[str]) -> None:
        self._settings = settings
        self._process = process
        self._scores_each = scores_each
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._runs = True
        self._has_leftovers = False
        self._last_message_s = 0.0

    @staticmethod
    async def start(settings: RewardPoolSettings, *, scores_each: set[str]) -> RewardProcess:
        """A process that has loaded the plugins.

        Arguments:
            scores_each: receives the names of reward models with scope ``group`` that report ``scores_each``.

        Raises:
            PluginError: it cannot load them.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = RewardProcess(settings, _spawn(settings, theirs), scores_each)
        try:
            await process._connect(ours)
        except BaseException:
            await process.end("crash")
            raise
        return process

    async def _connect(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours)
        settings = self._settings
        # Settings inside: plugins define the classes of their options, and the process loads the plugins first.
        setup = (settings.manifest, engine_access(), pickle.dumps(settings))
        try:
            write_frame(self._writer, pickle.dumps(setup))
            async with asyncio.timeout(START_LIMIT_S):
                first = json.loads(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            what = f"was not ready after {START_LIMIT_S:g} s" if late else "ended before it was ready"
            raise PluginError(f"a reward process {what}; its output is in {settings.log_file}") from error
        if first["event"] == "broken":
            raise PluginError(str(first["error"]))
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())]

    @property
    def takes_calls(self) -> bool:
        """Whether it runs, and no call has left a thread, a child or memory in it."""
        return self._runs and not self._has_leftovers

    async def score(self, name: str, samples: list[Sample], *, idle: Callable[[], None] | None = None) -> Answers:
        """The rewards of ``samples``, or why there are none; ``idle`` is called when they wait for something, because
        the process can then start another call."""
        number = next(self._numbers)
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), idle)
        try:
            with boundary(f"reward model {name!r}", "sending it what it scores", error=RunError):
                frame = pickle.dumps((number, name, samples))
            if self._runs:
                assert self._writer is not None
                write_frame(self._writer, frame)
            else:
                self._lose([call], "crash")
            message = await call.answer
        except RunError as error:
            return RewardFailure("invalid", str(error))
        finally:
            self._calls.pop(number, None)
        if message["event"] == "done":
            return _checked(name, message["rewards"], samples)
        cause, own = str(message["cause"]), str(message["error"])
        text = f"reward model {name!r}: {own}{_not_passed(own)}" if own else _failure_text(cause, name, self._settings)
        is_lost = message["event"] == "lost"
        is_own = is_lost and message["is_alone"] and cause == "timeout"
        return RewardFailure(cause, text, lost=is_lost or cause == "memory", own=is_own)

    async def drain(self) -> None:
        """End the process once its calls are answered."""
        await asyncio.gather(*(call.answer for call in self._calls.values()), return_exceptions=True)
        await self.end("timeout")

    async def end(self, cause: str) -> None:
        """End the process and its descendants; its calls fail with ``cause``."""
        self._runs = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.to_thread(_end, self._process)
        if self._writer is not None:
            self._writer.close()
        self._lose([call for call in self._calls.values() if not call.answer.done()], cause)

    @staticmethod
    def _lose(calls: Sequence[_Call], cause: str) -> None:
        """``calls`` end without an answer; one that had started alone is the only one that can have caused it."""
        started = [call for call in calls if call.started_s is not None]
        for call in calls:
            call.answer.set_result({"event": "lost", "cause": cause, "error": "", "is_alone": started == [call]})

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = json.loads(await read_frame(reader))
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                await self.end("crash")
                return
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        self._last_message_s = time.monotonic()
        if message["event"] == "scores_each":
            self._scores_each.add(str(message["name"]))
        # A call that timed out may leave a thread or a child, and one out of memory its memory: both would slow
        # down or fail other calls.
        self._has_leftovers = self._has_leftovers or message.get("cause") in ("timeout", "memory")
        call = self._calls.get(message.get("call", -1))
        if call is None or call.answer.done():
            return
        if message["event"] == "started":
            call.started_s = time.monotonic()
        elif message["event"] != "idle":
            call.answer.set_result(message)
        elif call.idle is not None:
            call.idle()

    async def _watch(self) -> None:
        before, cause = None, None
        # Two checks in a row, because messages that arrived while this event loop was busy are read between them.
        while cause is None or (cause == "timeout" and before is None):
            before = cause
            await asyncio.sleep(POLL_S)
            cause = self._end_cause()
        await self.end(cause)

    def _end_cause(self) -> str | None:
        """Why the process must end now; None: it need not."""
        limit_s, now_s = self._settings.timeout_s + GRACE_S, time.monotonic()
        if self._process.poll() is not None:
            return "crash"
        if any(now_s - since_s > limit_s for since_s in self._busy_since()):
            return "timeout"
        return "memory" if _memory(self._process.pid) > self._settings.memory_bytes else None

    def _busy_since(self) -> list[float]:
        """Start times of its running calls; if none runs, since when it could have started one."""
        left = [call for call in self._calls.values() if not call.answer.done()]
        starts = [call.started_s for call in left if call.started_s is not None]
        return starts or [max(call.sent_s, self._last_message_s) for call in left]


def _spawn(settings: RewardPoolSettings, theirs: socket.socket) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    log: Any = subprocess.DEVNULL if settings.log_file is None else settings.log_file.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "slime_core.rollout.reward_worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={
                **needed_environment(*PROXIES, *named_variables(settings.run.settings)),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            # SIGTERM, not SIGKILL: its supervisor then ends the children of rewards too.
            preexec_fn=lambda: die_with(parent, signal.SIGTERM),
        )
    finally:
        if settings.log_file is not None:
            log.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _memory(pid: int) -> int:
    """Resident bytes of a process and its children; 0 if it has ended."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for one in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # one of them has ended meanwhile
                found += int(one.memory_info().rss)
    return found


def _checked(name: str, rewards: Sequence[Any], samples: Sequence[Sample]) -> Answers:
    if len(rewards) != len(samples):
        found = f"returned {len(rewards)} rewards for {len(samples)} samples"
        return RewardFailure("invalid", f"reward model {name!r} {found}")
    return [_valid(name, reward) for reward in rewards]


def _valid(name: str, reward: Any) -> Reward | RewardFailure:
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    if all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return {key: float(number) for key, number in reward.items()} if isinstance(reward, dict) else float(reward)
    accepted = "accepted: a finite number, or a dict of them with --reward-key"
    return RewardFailure("invalid", f"reward model {name!r} returned {reward!r:.200}; {accepted}")


def _not_passed(error: str) -> str:
    """Advice where ``error`` names an environment variable of this process that reward processes do not get."""
    given = needed_environment()
    missing = [name for name in os.environ if len(name) >= SHORTEST_NAME and name not in given and name in error]
    if not missing:
        return ""
    return f". Reward processes do not get {missing[0]}; export {PASS_ENV}={missing[0]} to pass it on"


SHORTEST_NAME = 4
"""Characters of the shortest name of a variable that is looked for in an error."""


def _failure_text(cause: str, name: str, settings: RewardPoolSettings) -> str:
    text = {
        "timeout": f"took more than {settings.timeout_s:g} s (--reward-timeout-s) and was ended",
        "memory": f"took more than {settings.memory_gib:g} GiB (--reward-memory-gib) and was ended",
        "crash": f"ended its process; its output is in {settings.log_file}",
    }
    return f"reward model {name!r} {text[cause]}"


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
        self._free_slots = _queue(self._slots)
        self._free_isolated = _queue(self._isolated_slots)
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
        self._settings = settings
        self._place = place
        self._scores_each = each
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
