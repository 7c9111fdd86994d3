"""The pool of reward processes: a reward that hangs, crashes or eats memory fails its own samples and no others.

    RewardPool      chooses the process of each call
    RewardProcess   one process, seen from the sampler: its socket, its calls in flight, and its end
    main            the program of a process: scores the samples that the sampler sends

Every call gets an answer, whatever the process does. A call times out inside the process, unless it holds the
interpreter; then, or over the memory limit, the sampler kills the process. All processes load exactly the driver's
plugins.

The pool has two kinds of slots, with one process each. A shared slot gets a call only while its event loop is idle: no
call waits for one that computes or hangs, and calls that wait for a network overlap. Isolated slots, as many again,
start once a process has died: each repeats one lost sample at a time, so that only the sample at fault fails. N samples
that hang therefore take about N / workers time limits.

    sampler -> process   a pickled (call, reward model, samples)
    process -> sampler   JSON, so that the sampler never unpickles what user code wrote: {"ready": true},
                         {"started": call}, {"idle": call}, {"done": call, "rewards": [...]},
                         {"failed": call, "cause": ..., "error": ...}, {"broken": why it cannot work at all}

The process that the sampler starts is a supervisor. It forks the worker, adopts orphaned descendants, and ends them all
on SIGTERM or when the sampler dies. In the worker, calls run concurrently in one event loop, so that rewards which wait
for a network overlap. "started" is sent when a call starts to run; its time limit counts from there. "idle" is sent
when the event loop gets control back: the call waits for something, and another one can run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import numbers
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil  # type: ignore[import-untyped]

from slime_core.config.secrets import (
    PASS_ENV,
    PROXIES,
    engine_access,
    named_variables,
    needed_environment,
    set_engine_access,
    without_queries,
)
from slime_core.errors import PluginError, RunError, SlimeError
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import RunView
from slime_core.plugins.loading import boundary
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registry import Registry
from slime_core.runtime.supervisor import HANDLED, LIBC, die_with, fork_with_proxy
from slime_core.types import Reward, RewardFailure, Sample

POLL_S = 0.1
"""Seconds between two checks of the process."""

GRACE_S = 1.0
"""Seconds beyond the time limit in which a waiting call ends by itself."""

START_LIMIT_S = 120.0
"""A reward may import a library that takes a minute on a busy machine."""

LENGTH_BYTES = 8
"""Bytes of a frame's length, big-endian."""

END_GRACE_S = 10.0
"""Seconds after SIGTERM in which a process ends its children; after SIGKILL it could not."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError: the other side has gone.
    """
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))


def write_frame(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send one frame: 8 bytes of length, then the content."""
    writer.write(len(content).to_bytes(LENGTH_BYTES) + content)


Answers = list[Reward | RewardFailure] | RewardFailure
"""One for each sample of a call, or why the whole call failed."""


@dataclass(frozen=True, slots=True)
class RewardPoolSettings:
    """Settings of the reward processes.

    Arguments:
        manifest: the run's plugins, as :meth:`slime_core.plugins.manifest.Manifest.to_json` writes them.
        options: plugin name -> its options object.
        run: argument of every reward model.
        num_workers: processes.
        timeout_s: seconds that one call may take.
        memory_gib: memory that one process and its children may use.
        log_file: receives the output of rewards; None: it is dropped.
    """

    manifest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunView = field(default_factory=RunView)
    num_workers: int = 2
    timeout_s: float = 30.0
    memory_gib: float = 4.0
    log_file: Path | None = None

    @property
    def memory_bytes(self) -> int:
        """The limit of one process."""
        return int(self.memory_gib * 2**30)


class _LostError(Exception):
    """The process ended: why, and whether it was working on this call alone."""

    def __init__(self, cause: str, is_alone: bool = False) -> None:
        self.cause = cause
        self.is_alone = is_alone
        super().__init__(cause)


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[Any]
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
        setup = {
            "manifest": settings.manifest,
            # Pickled: their classes are defined by plugins, which the process loads first.
            "options": pickle.dumps(dict(settings.options)),
            "run": settings.run.to_json(),
            "timeout_s": settings.timeout_s,
            "memory_bytes": settings.memory_bytes,
            "engine_access": engine_access(),
        }
        try:
            write_frame(self._writer, pickle.dumps(setup))
            async with asyncio.timeout(START_LIMIT_S):
                first = json.loads(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            what = f"was not ready after {START_LIMIT_S:g} s" if late else "ended before it was ready"
            raise PluginError(f"a reward process {what}; its output is in {settings.log_file}") from error
        if "broken" in first:
            raise PluginError(str(first["broken"]))
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
            assert self._writer is not None
            if not self._runs:
                raise _LostError("crash")
            with boundary(f"reward model {name!r}", "sending it what it scores", error=RunError):
                frame = pickle.dumps((number, name, samples))
            write_frame(self._writer, frame)
            message = await call.answer
        except RunError as error:
            return RewardFailure("invalid", str(error))
        except (_LostError, ConnectionError) as lost:
            cause = lost.cause if isinstance(lost, _LostError) else "crash"
            is_own = isinstance(lost, _LostError) and lost.is_alone and cause == "timeout"
            return RewardFailure(cause, _failure_text(cause, name, self._settings), lost=True, own=is_own)
        finally:
            self._calls.pop(number, None)
        if "failed" in message:
            cause, own = str(message["cause"]), str(message["error"])
            text = (
                f"reward model {name!r}: {own}{_not_passed(own)}" if own else _failure_text(cause, name, self._settings)
            )
            return RewardFailure(cause, text, lost=cause == "memory")
        return _checked(name, message["rewards"], samples)

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
        left = [call for call in self._calls.values() if not call.answer.done()]
        num_started = sum(call.started_s is not None for call in left)
        for call in left:
            call.answer.set_exception(_LostError(cause, is_alone=call.started_s is not None and num_started == 1))

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
        if "scores_each" in message:
            self._scores_each.add(str(message["scores_each"]))
        # A call that timed out may leave a thread or a child, and one out of memory its memory: both would slow
        # down or fail other calls.
        self._has_leftovers = self._has_leftovers or message.get("cause") in ("timeout", "memory")
        number = next((message[key] for key in ("started", "idle", "done", "failed") if key in message), -1)
        call = self._calls.get(int(number))
        if call is None or call.answer.done():
            return
        if "started" in message:
            call.started_s = time.monotonic()
        elif "idle" in message:
            if call.idle is not None:
                call.idle()
        else:
            call.answer.set_result(message)

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
            [sys.executable, "-m", "slime_core.rollout.reward_pool", str(theirs.fileno())],
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
    accepted = "accepted is a finite number, or a dict of them with --reward-key"
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


# --- The program of a reward process ---------------------------------------------------------------------------------

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""

KILL_GRACE_S = 1.0
"""Seconds to wait for killed processes."""

LIMITS: dict[type[BaseException], str] = {TimeoutError: "timeout", MemoryError: "memory"}
"""Exception at a limit -> the cause under which metrics count it."""

MAX_ANSWER_BYTES = 2**24
"""Limit of one answer in bytes, because the sampler holds it in memory."""

MAX_ERROR_CHARS = 2000
"""Characters of an exception's message that its sample keeps."""


def main() -> None:
    """Serve the socket whose descriptor is the first argument until the parent closes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    fork_with_proxy()
    signal.signal(signal.SIGTERM, lambda *_: _exit_with_descendants())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    # Orphaned descendants become children of the supervisor, whatever session they are in.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        die_with(supervisor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close_in_children(connection)
        asyncio.run(_serve(connection))
    else:
        connection.close()
        _supervise(worker)


def _close_in_children(connection: socket.socket) -> None:
    """Close the socket in processes that a reward forks, so that they neither read requests nor answer them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, connection.fileno()))


def _supervise(worker: int) -> None:
    while os.waitpid(-1, 0)[0] != worker:
        continue
    _exit_with_descendants()


def _exit_with_descendants() -> None:
    """End this process and all descendants. They are stopped first, so that none of them forks meanwhile."""
    children: list[psutil.Process] = []
    for what in (signal.SIGSTOP, signal.SIGKILL):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(what)
    psutil.wait_procs(children, timeout=KILL_GRACE_S)
    os._exit(0)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        worker = _Worker(pickle.loads(await read_frame(reader)), writer)
    except SlimeError as error:
        _send(writer, broken=str(error))
        await writer.drain()
        return
    worker.send(ready=True)
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            frame = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(worker.run(*pickle.loads(frame)))
        running.add(task)
        task.add_done_callback(running.discard)


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    write_frame(writer, json.dumps(message).encode())


@runtime_checkable
class _ScoresEach(Protocol):
    """A reward model of scope ``group`` that may score each sample by itself."""

    scores_each: bool


class _Worker:
    """The reward models of this process, each made at its first call."""

    def __init__(self, setup: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        limit = setup["memory_bytes"]
        # RLIMIT_DATA counts private memory; libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._registry: Registry = attach(Manifest.from_json(setup["manifest"]))
        self._options: dict[str, Any] = pickle.loads(setup["options"])
        self._run_view = RunView.from_json(setup["run"])
        set_engine_access(setup["engine_access"])
        self._timeout_s: float = setup["timeout_s"]
        self._writer = writer
        self._process = os.getpid()
        self._models: dict[str, Any] = {}

    def send(self, **message: Any) -> None:
        _send(self._writer, **message)

    async def run(self, call: int, name: str, samples: list[Any]) -> None:
        try:
            await self._run(call, name, samples)
        finally:
            if os.getpid() != self._process:  # a fork of the reward: it must not continue as a worker
                os._exit(0)

    async def _run(self, call: int, name: str, samples: list[Any]) -> None:
        self.send(started=call)
        asyncio.get_running_loop().call_soon(lambda: self.send(idle=call))
        try:
            # An exception of the reward fails the samples of this call, with its own message.
            with boundary(f"reward model {name!r}", "scoring"):
                async with asyncio.timeout(self._timeout_s):
                    rewards = await self._model(name).score(samples)
                answer = json.dumps({"done": call, "rewards": [_plain(reward) for reward in rewards]}).encode()
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"the rewards of one call take more than {MAX_ANSWER_BYTES} bytes")
            write_frame(self._writer, answer)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt) as error:
            # This program never cancels a call, so the reward did: `await task` of a cancelled task raises this.
            self.send(failed=call, cause=type(error).__name__, error=f"it raised {type(error).__name__}")
        except SlimeError as error:
            cause = _cause(error.__cause__)
            # Exceptions at limits have no message; the sampler knows the limits and words it.
            own = str(error.__cause__ or error) or ("" if cause in LIMITS.values() else str(error))
            # An unpaired surrogate, which the JSON of a response may hold, cannot be written to a file.
            reported = without_queries(own)[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
            self.send(failed=call, cause=cause, error=reported)

    def _model(self, name: str) -> Any:
        if name not in self._models:
            model = construct(self._registry, Kind.REWARD_MODEL, name, self._options, self._run_view)
            if isinstance(model, _ScoresEach) and model.scores_each:
                self.send(scores_each=name)  # before scoring, which may end the process
            self._models[name] = model
        return self._models[name]


def _plain(reward: Any) -> Any:
    """The reward for JSON: numpy and torch scalars become floats, anything else becomes text."""
    if isinstance(reward, dict):
        return {str(name): _plain(value) for name, value in reward.items()}
    if isinstance(reward, numbers.Real):
        return float(reward)
    if hasattr(reward, "item") and getattr(reward, "ndim", None) == 0:
        return float(reward.item())
    return None if reward is None else f"{reward if isinstance(reward, str) else repr(reward):.200}"


def _cause(error: BaseException | None) -> str:
    while isinstance(error, SlimeError) and error.__cause__ is not None:  # unwrap the adapter's error
        error = error.__cause__
    if isinstance(error, PluginError):  # an adapter refuses what the function returned
        return "invalid"
    return next((cause for kind, cause in LIMITS.items() if isinstance(error, kind)), type(error).__name__)


if __name__ == "__main__":
    main()
