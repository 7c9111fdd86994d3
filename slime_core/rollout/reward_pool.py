"""The pool of reward processes: a reward that hangs, crashes or exhausts memory fails only the samples of its call.

    RewardPool      chooses the process of each call, and repeats lost calls
    RewardProcess   one process, seen from the sampler: its socket, its calls in flight, and its end

:mod:`slime_core.rollout.reward_worker` is the program of a process. docs/dependencies.md says why this is no library.

Every call gets an answer, whatever the process does. A call times out inside the process, unless it holds the
interpreter; then the sampler kills the process with all its descendants. All processes load exactly the driver's
plugins.

A process gets a call only while its event loop is idle: no call waits for one that computes or hangs, and calls that
wait for a network overlap. If a process dies, each lost sample is scored once more in a process that it does not share,
so that only the sample at fault fails.
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

from slime_core.config.secrets import PROXIES, engine_access, named_variables, needed_environment
from slime_core.errors import PluginError, RunError
from slime_core.rollout.reward_worker import RewardPoolSettings, read_frame, write_frame
from slime_core.runtime.supervisor import die_with, supervised
from slime_core.types import Reward, RewardFailure, Sample
from slime_core.user_code.failures import boundary

POLL_S = 0.1
"""Seconds between two checks of the process."""

GRACE_S = 1.0
"""Seconds after the time limit in which a call that waits ends by itself."""

START_LIMIT_S = 120.0
"""A reward may import a library that takes a minute on a busy machine."""

END_GRACE_S = 10.0
"""Seconds after SIGTERM in which the supervisor kills all descendants; after SIGKILL it could not."""

CALLS_PER_PROCESS = 16
"""Calls in flight in one process; more wait in the sampler, because a crash loses calls in flight."""

Answers = list[Reward | RewardFailure] | RewardFailure
"""One answer for each sample of a call, or why the call failed."""

CLOSED = RewardFailure("crash", "the processes of reward models were ended before it was scored")


@dataclass(slots=True, eq=False)
class _Call:
    answer: asyncio.Future[dict[str, Any]]
    idle: Callable[[], None] | None
    sent_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None


class RewardProcess:
    """One process; belongs to one event loop.

    Arguments:
        scores_each: receives the names of reward models with scope ``group`` that report ``scores_each``.
    """

    def __init__(self, settings: RewardPoolSettings, scores_each: set[str]) -> None:
        self._settings = settings
        self._scores_each = scores_each
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_running = True
        self._has_leftovers = False
        self._last_message_s = 0.0
        self._socket, remote = socket.socketpair()
        with remote:
            self._process = _spawn(settings, remote)

    async def connect(self) -> None:
        """Send the settings, and wait until the process has loaded the plugins.

        Raises:
            PluginError: it cannot load them.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        settings = self._settings
        # Settings inside: plugins define the classes of their options, and the process loads the plugins first.
        setup = (settings.manifest, engine_access(), pickle.dumps(settings))
        try:
            write_frame(self._writer, pickle.dumps(setup))
            async with asyncio.timeout(START_LIMIT_S):
                first = json.loads(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            is_late = isinstance(error, TimeoutError)
            problem = f"was not ready after {START_LIMIT_S:g} s" if is_late else "ended before it was ready"
            raise PluginError(f"a reward process {problem}; its output is in {settings.log_file}") from error
        if first["event"] == "broken":
            raise PluginError(str(first["error"]))
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())]

    @property
    def takes_calls(self) -> bool:
        """True if the process runs, and no call has left a thread, a child or memory in it."""
        return self.is_running and not self._has_leftovers

    async def score(self, name: str, samples: list[Sample], *, idle: Callable[[], None] | None = None) -> Answers:
        """Return the rewards of ``samples``, or why there are none.

        Arguments:
            idle: called when the reward waits for something, because the process can then start another call.
        """
        number = next(self._numbers)
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future(), idle)
        try:
            with boundary(f"reward model {name!r}", "sending the samples to its process", error=RunError):
                frame = pickle.dumps((number, name, samples))
            if self.is_running and self._writer is not None:
                write_frame(self._writer, frame)
            else:
                self._lose([call], "crash")
            message = await call.answer
        except RunError as error:
            return RewardFailure("invalid", str(error))
        finally:
            self._calls.pop(number, None)
            if self._has_leftovers and not self._calls:
                await self.end("timeout")
        if message["event"] == "done":
            return _checked(name, message["rewards"], samples)
        cause, reported = str(message["cause"]), str(message["error"])
        text = f"reward model {name!r}: {reported}" if reported else _limit_text(cause, name, self._settings)
        is_lost = message["event"] == "lost"
        is_own = is_lost and message["is_alone"] and cause == "timeout"
        return RewardFailure(cause, text, lost=is_lost or cause == "memory", own=is_own)

    async def end(self, cause: str) -> None:
        """End the process and its descendants; its calls fail with ``cause``."""
        self.is_running = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.to_thread(_end, self._process)
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
        self._lose([call for call in self._calls.values() if not call.answer.done()], cause)

    @staticmethod
    def _lose(calls: Sequence[_Call], cause: str) -> None:
        """End ``calls`` without an answer; a call that had started alone is the only possible cause."""
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
        # Two checks in a row, because messages that arrived while this event loop was busy are read between them.
        num_overdue = 0
        while num_overdue < 2:
            await asyncio.sleep(POLL_S)
            num_overdue = num_overdue + 1 if self._is_overdue() else 0
        await self.end("timeout")

    def _is_overdue(self) -> bool:
        """Return whether a call has run beyond the limit, or the process has not started any call for as long."""
        calls = [call for call in self._calls.values() if not call.answer.done()]
        starts = [call.started_s for call in calls if call.started_s is not None]
        since_s = starts or [max(call.sent_s, self._last_message_s) for call in calls]
        return time.monotonic() - min(since_s, default=math.inf) > self._settings.timeout_s + GRACE_S


def _spawn(settings: RewardPoolSettings, remote: socket.socket) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    program = [sys.executable, "-m", "slime_core.rollout.reward_worker", str(remote.fileno())]
    log: Any = subprocess.DEVNULL if settings.log_file is None else settings.log_file.open("ab")
    try:
        return subprocess.Popen(
            supervised("", program),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[remote.fileno()],
            start_new_session=True,
            env={
                **needed_environment(*PROXIES, *named_variables(settings.run.settings)),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
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


def _checked(name: str, rewards: Sequence[Any], samples: Sequence[Sample]) -> Answers:
    if len(rewards) != len(samples):
        counts = f"{len(rewards)} rewards for {len(samples)} samples"
        return RewardFailure("invalid", f"reward model {name!r} returned {counts}")
    return [_valid(name, reward) for reward in rewards]


def _valid(name: str, reward: Any) -> Reward | RewardFailure:
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    if all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return {key: float(number) for key, number in reward.items()} if isinstance(reward, dict) else float(reward)
    accepted = "accepted: a finite number, or a dict of them with --reward-key"
    return RewardFailure("invalid", f"reward model {name!r} returned {reward!r:.200}; {accepted}")


def _limit_text(cause: str, name: str, settings: RewardPoolSettings) -> str:
    text = {
        "timeout": f"took more than {settings.timeout_s:g} s (--reward-timeout-s) and was ended",
        "memory": f"took more than {settings.memory_gib:g} GiB (--reward-memory-gib) and was ended",
        "crash": f"ended its process; its output is in {settings.log_file}",
    }
    return f"reward model {name!r} {text[cause]}"


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for one process, which is replaced when it takes no more calls."""

    process: RewardProcess | None = None
    num_calls: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class RewardPool:
    """Starts processes when they are needed, and ends them in :meth:`close`; use it in one event loop."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._settings = settings
        self._scores_each: set[str] = set()
        self._slots = [_Slot() for _ in range(settings.num_workers)]
        self._idle: asyncio.PriorityQueue[tuple[int, int]] = asyncio.PriorityQueue()  # number of calls, slot
        for place in range(settings.num_workers):
            self._idle.put_nowait((0, place))
        self._room = asyncio.Semaphore(settings.num_workers * CALLS_PER_PROCESS)
        self._retries = asyncio.Semaphore(settings.num_workers)
        self._processes: set[RewardProcess] = set()
        self._is_closed = False

    async def score(self, name: str, samples: Sequence[Sample], *, together: bool) -> list[Reward | RewardFailure]:
        """Return a reward or a failure for each of ``samples``, in order.

        Arguments:
            name: of the reward model.
            together: the model must get all of them at once; if it fails, they all fail. A model that reports
                ``scores_each`` gets them one by one when they are repeated.

        Raises:
            PluginError: a process cannot load the run's plugins.
        """
        answers = await self._score(name, list(samples))
        if not isinstance(answers, RewardFailure):
            return answers
        is_group = together and name not in self._scores_each
        parts = [list(samples)] if is_group else [[sample] for sample in samples]
        if len(parts) == 1 and (answers.own or not answers.lost):
            return [answers] * len(samples)
        repeat = self._score_alone if answers.lost else self._score
        repeated = await asyncio.gather(*(repeat(name, part) for part in parts))
        return [reward for part, answer in zip(parts, repeated, strict=True) for reward in _each(answer, len(part))]

    async def close(self) -> None:
        """End every process; calls in flight fail and are not repeated."""
        self._is_closed = True
        await asyncio.gather(*(process.end("crash") for process in self._processes))

    async def _score(self, name: str, samples: list[Sample]) -> Answers:
        """Score ``samples`` in the idle process with the fewest calls."""
        async with self._room:
            _, place = await self._idle.get()
            slot = self._slots[place]
            slot.num_calls += 1
            with ExitStack() as turn:
                turn.callback(lambda: self._idle.put_nowait((slot.num_calls, place)))
                try:
                    process = await self._process_of(slot)
                    return CLOSED if process is None else await process.score(name, samples, idle=turn.close)
                finally:
                    slot.num_calls -= 1

    async def _score_alone(self, name: str, samples: list[Sample]) -> Answers:
        """Score ``samples`` in a process that takes no other calls."""
        async with self._retries:
            process = await self._start()
            if process is None:
                return CLOSED
            try:
                return await process.score(name, samples)
            finally:
                await self._end(process)

    async def _process_of(self, slot: _Slot) -> RewardProcess | None:
        async with slot.starting:
            if slot.process is None or not slot.process.takes_calls:
                slot.process = await self._start()
            return slot.process

    async def _start(self) -> RewardProcess | None:
        """Start a process; return None if the pool is closed."""
        if self._is_closed:
            return None
        process = RewardProcess(self._settings, self._scores_each)
        self._processes = {process, *(other for other in self._processes if other.is_running)}
        try:
            await process.connect()
        except BaseException:
            await self._end(process)
            if self._is_closed:
                return None
            raise
        return process

    async def _end(self, process: RewardProcess) -> None:
        await process.end("crash")
        self._processes.discard(process)


def _each(answer: Answers, count: int) -> list[Reward | RewardFailure]:
    return [answer] * count if isinstance(answer, RewardFailure) else answer
