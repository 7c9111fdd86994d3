"""Rewards in processes of their own: one that hangs, crashes or eats memory costs its own samples, and nothing else.

    RewardPool      scores samples; gives each a reward or a failure, never raises for what a reward does
    _Worker         one process (:mod:`slime_core.rollout.reward_worker`), its socket and what it is working on
    _watch          ends a worker that is over a limit; a call times out by itself unless it holds the interpreter

When a worker dies, the calls that it had are repeated one by one in a worker kept for that, so that only the guilty one
fails. Workers load exactly the driver's plugins. They answer in JSON: what user code wrote is never unpickled here.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from slime_core.errors import PluginError, RunError
from slime_core.rollout.process import die_with
from slime_core.rollout.reward_worker import read_frame, write_frame
from slime_core.types import Sample

__all__ = ["Reward", "RewardFailure", "RewardPool", "RewardPoolSettings"]

LOOK_S = 0.1
"""Seconds between two looks at the workers."""

GRACE_S = 1.0
"""Seconds after its time limit in which a call that waits for something ends by itself."""

START_LIMIT_S = 120.0
"""A reward may import a library that takes a minute on a busy machine."""

CALLS_A_WORKER = 16
"""Calls in flight in one worker; more wait here, where nothing can happen to them."""

Reward = float | dict[str, float]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward.

    Arguments:
        cause: one word to count by: ``timeout``, ``memory``, ``crash``, ``invalid``, or the name of an exception.
        error: for people.
        lost: whether the worker ended with it, so that another call may have been the guilty one.
    """

    cause: str
    error: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RewardPoolSettings:
    """What a pool needs to know.

    Arguments:
        manifest: the run's plugins, as :meth:`slime_core.plugins.manifest.Manifest.to_json` writes them.
        options: plugin name -> its options object.
        num_workers: processes.
        timeout_s: seconds that one call may take.
        memory_gib: memory that one worker may use.
        log_file: receives what rewards print; None: nothing does.
    """

    manifest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int = 2
    timeout_s: float = 30.0
    memory_gib: float = 4.0
    log_file: Path | None = None

    @property
    def memory_bytes(self) -> int:
        """The limit of one worker."""
        return int(self.memory_gib * 2**30)


class _WorkerLostError(Exception):
    """The worker was ended, or ended; the argument is the cause that it had."""


class RewardPool:
    """Starts workers when they are needed; belongs to one event loop. :meth:`close` leaves no process behind."""

    def __init__(self, settings: RewardPoolSettings) -> None:
        self._settings = settings
        self._workers: list[_Worker | None] = [None] * settings.num_workers
        self._starting = [asyncio.Lock() for _ in range(settings.num_workers)]
        self._slots = asyncio.Semaphore(settings.num_workers * CALLS_A_WORKER)
        self._alone = asyncio.Lock()
        self._isolated: _Worker | None = None

    async def score(self, name: str, samples: Sequence[Sample], *, together: bool) -> list[Reward | RewardFailure]:
        """A reward or a failure for each of ``samples``, in order.

        Arguments:
            name: of the reward model.
            together: the model has to see all of them at once; if it fails, they all do.

        Raises:
            PluginError: a worker cannot load the run's plugins.
        """
        found = await self._shared(name, list(samples))
        if not isinstance(found, RewardFailure):
            return found
        parts = [list(samples)] if together else [[sample] for sample in samples]
        if len(parts) == 1 and not found.lost:
            return [found] * len(samples)
        again = self._isolate if found.lost else self._shared
        answers = [(part, await again(name, part)) for part in parts]
        return [one for part, answer in answers for one in _each(answer, len(part))]

    async def close(self) -> None:
        """End every worker."""
        for worker in [*self._workers, self._isolated]:
            if worker is not None:
                await worker.end("crash")

    async def _shared(self, name: str, samples: list[Sample]) -> list[Reward | RewardFailure] | RewardFailure:
        async with self._slots:
            number = min(range(len(self._workers)), key=self._load)
            async with self._starting[number]:
                worker = self._workers[number]
                if worker is None or not worker.is_alive:
                    worker = self._workers[number] = await _Worker.start(self._settings)
            return await worker.score(name, samples)

    def _load(self, number: int) -> int:
        worker = self._workers[number]
        return 0 if worker is None else worker.num_calls

    async def _isolate(self, name: str, samples: list[Sample]) -> list[Reward | RewardFailure] | RewardFailure:
        async with self._alone:
            if self._isolated is None or not self._isolated.is_alive:
                self._isolated = await _Worker.start(self._settings)
            return await self._isolated.score(name, samples)


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[Any]
    begun_s: float | None = None


class _Worker:
    """One process and the calls that it has; made by :meth:`start`."""

    def __init__(self, settings: RewardPoolSettings, process: subprocess.Popen[bytes]) -> None:
        self._settings, self._process = settings, process
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_alive = True

    @staticmethod
    async def start(settings: RewardPoolSettings) -> _Worker:
        """A process that has loaded the plugins.

        Raises:
            PluginError: it cannot.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            worker = _Worker(settings, _spawn(settings, theirs))
        reader, writer = await asyncio.open_connection(sock=ours)
        worker._writer = writer
        setup = {
            "manifest": settings.manifest,
            # Objects of classes that plugins define: readable there once those are loaded.
            "options": pickle.dumps(dict(settings.options)),
            "timeout_s": settings.timeout_s,
            "memory_bytes": settings.memory_bytes,
        }
        write_frame(writer, pickle.dumps(setup))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = json.loads(await read_frame(reader))
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            await worker.end("crash")
            raise PluginError(f"a reward worker ended before it was ready; see {settings.log_file}") from error
        if "broken" in first:
            await worker.end("crash")
            raise PluginError(str(first["broken"]))
        worker._tasks = [asyncio.create_task(worker._listen(reader)), asyncio.create_task(worker._watch())]
        return worker

    @property
    def num_calls(self) -> int:
        """Calls in flight."""
        return len(self._calls)

    async def score(self, name: str, samples: list[Sample]) -> list[Reward | RewardFailure] | RewardFailure:
        """The rewards, or why the whole call failed."""
        number = next(self._numbers)
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future())
        try:
            assert self._writer is not None
            write_frame(self._writer, pickle.dumps((number, name, samples)))
            message = await call.answer
        except (_WorkerLostError, ConnectionError) as lost:
            cause = str(lost) if isinstance(lost, _WorkerLostError) else "crash"
            return RewardFailure(cause, _said(cause, name, self._settings), lost=True)
        finally:
            self._calls.pop(number, None)
        if "failed" in message:
            return RewardFailure(str(message["cause"]), f"reward model {name!r}: {message['error']}")
        return _checked(name, message["rewards"], samples)

    async def end(self, cause: str) -> None:
        """The process and all its children are gone; calls that it had learn ``cause``."""
        self.is_alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        if self._writer is not None:
            self._writer.close()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(_WorkerLostError(cause))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                message = json.loads(await read_frame(reader))
            except (asyncio.IncompleteReadError, ConnectionError):
                await self.end("crash")
                return
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        call = self._calls.get(int(message.get("begun", message.get("done", message.get("failed", -1)))))
        if call is None:
            return
        if "begun" in message:
            call.begun_s = time.monotonic()
        elif not call.answer.done():
            call.answer.set_result(message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._is_late():
                await self.end("timeout")
                return
            if _memory(self._process.pid) > self._settings.memory_bytes:
                await self.end("memory")
                return

    def _is_late(self) -> bool:
        limit_s = self._settings.timeout_s + GRACE_S
        now_s = time.monotonic()
        return any(call.begun_s is not None and now_s - call.begun_s > limit_s for call in self._calls.values())


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
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            preexec_fn=lambda: die_with(parent),
        )
    finally:
        if settings.log_file is not None:
            log.close()


def _each(answer: list[Reward | RewardFailure] | RewardFailure, count: int) -> list[Reward | RewardFailure]:
    return [answer] * count if isinstance(answer, RewardFailure) else answer


def _memory(pid: int) -> int:
    """Resident bytes of a process and its children; 0 where it has gone."""
    try:
        root = psutil.Process(pid)
        return sum(int(one.memory_info().rss) for one in [root, *root.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def _checked(name: str, rewards: Sequence[Any], samples: Sequence[Sample]) -> list[Reward | RewardFailure]:
    if len(rewards) != len(samples):
        raise RunError(f"reward model {name!r} returned {len(rewards)} rewards for {len(samples)} samples")
    return [_valid(name, reward) for reward in rewards]


def _valid(name: str, reward: Any) -> Reward | RewardFailure:
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    if all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return {key: float(number) for key, number in reward.items()} if isinstance(reward, dict) else float(reward)
    accepted = "accepted is a finite number, or a dict of them with --reward-key"
    return RewardFailure("invalid", f"reward model {name!r} returned {reward!r}; {accepted}")


def _said(cause: str, name: str, settings: RewardPoolSettings) -> str:
    said = {
        "timeout": f"took more than {settings.timeout_s:g} s (--reward-timeout-s) and was ended",
        "memory": f"took more than {settings.memory_gib:g} GiB (--reward-memory-gib) and was ended",
        "crash": f"ended its process; what it printed is in {settings.log_file}",
    }
    return f"reward model {name!r} {said[cause]}"
