"""The program of a reward process: scores the samples that the sampler sends.

The process that the sampler starts is a supervisor. It forks the worker, adopts orphaned descendants, and ends them all
on SIGTERM or when the sampler dies. In the worker, calls run concurrently in one event loop, so that rewards which wait
for a network overlap.

    sampler -> process   once, pickled settings; then a pickled (call, reward model, samples) each
    process -> sampler   JSON, so that the sampler never unpickles what user code wrote; ``event`` is

        ready        it takes calls
        broken       it cannot work at all; ``error`` says why
        started      ``call`` starts to run; its time limit counts from there
        idle         the event loop got control back: ``call`` waits for something, and another one can run
        done         the ``rewards`` of ``call``
        failed       why ``call`` has none: ``cause``, ``error``
        scores_each  the reward model ``name`` of scope ``group`` may score each sample by itself
"""

from __future__ import annotations

import asyncio
import json
import numbers
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil  # type: ignore[import-untyped]

from slime_core.components.construction import construct
from slime_core.config.secrets import set_engine_access, without_queries
from slime_core.contracts import RunView
from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.runtime.supervisor import HANDLED, LIBC, die_with, fork_with_proxy
from slime_core.user_code.failures import boundary, log_traceback, place_of, tracebacks_into

LENGTH_BYTES = 8
"""Bytes of a frame's length, big-endian."""

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


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError: the other side has gone.
    """
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))


def write_frame(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send one frame: 8 bytes of length, then the content."""
    writer.write(len(content).to_bytes(LENGTH_BYTES) + content)


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
        worker = _Worker(await read_frame(reader), writer)
    except SlimeError as error:
        _send(writer, "broken", error=str(error))
        await writer.drain()
        return
    worker.send("ready")
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            frame = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(worker.run(*pickle.loads(frame)))
        running.add(task)
        task.add_done_callback(running.discard)


def _send(writer: asyncio.StreamWriter, event: str, **details: Any) -> None:
    write_frame(writer, json.dumps({"event": event, **details}).encode())


@runtime_checkable
class _ScoresEach(Protocol):
    """A reward model of scope ``group`` that may score each sample by itself."""

    scores_each: bool


class _Worker:
    """The reward models of this process, each made at its first call."""

    def __init__(self, setup: bytes, writer: asyncio.StreamWriter) -> None:
        manifest, access, settings = pickle.loads(setup)
        self._registry: Registry = attach(Manifest.from_json(manifest))
        set_engine_access(access)
        self._settings: RewardPoolSettings = pickle.loads(settings)
        limit = self._settings.memory_bytes
        # RLIMIT_DATA counts private memory; libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._writer = writer
        self._process = os.getpid()
        self._models: dict[str, Any] = {}
        if self._settings.log_file is not None:
            with suppress(OSError):
                tracebacks_into(self._settings.log_file)

    def send(self, event: str, **details: Any) -> None:
        _send(self._writer, event, **details)

    async def run(self, call: int, name: str, samples: list[Any]) -> None:
        try:
            await self._run(call, name, samples)
        finally:
            if os.getpid() != self._process:  # a fork of the reward: it must not continue as a worker
                os._exit(0)

    async def _run(self, call: int, name: str, samples: list[Any]) -> None:
        self.send("started", call=call)
        asyncio.get_running_loop().call_soon(lambda: self.send("idle", call=call))
        try:
            # An exception of the reward fails the samples of this call, with its own message.
            with boundary(f"reward model {name!r}", "scoring"):
                async with asyncio.timeout(self._settings.timeout_s):
                    rewards = await self._model(name).score(samples)
                answer = json.dumps(
                    {"event": "done", "call": call, "rewards": [_plain(reward) for reward in rewards]}
                ).encode()
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"the rewards of one call take more than {MAX_ANSWER_BYTES} bytes")
            write_frame(self._writer, answer)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt) as error:
            # This program never cancels a call, so the reward did: `await task` of a cancelled task raises this.
            self.send("failed", call=call, cause=type(error).__name__, error=f"it raised {type(error).__name__}")
        except SlimeError as error:
            cause = _cause(error.__cause__)
            # Exceptions at limits have no message; the sampler knows the limits and words it.
            own = str(error.__cause__ or error) or ("" if cause in LIMITS.values() else str(error))
            if cause not in LIMITS.values():
                own = self._located(own, error.__cause__)
            # An unpaired surrogate, which the JSON of a response may hold, cannot be written to a file.
            reported = without_queries(own)[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
            self.send("failed", call=call, cause=cause, error=reported)

    def _located(self, text: str, failure: BaseException | None) -> str:
        """Return ``text`` with the place in the reward's code that raised ``failure``, and the log with its traceback;
        without both for errors of ours."""
        if failure is None or isinstance(failure, SlimeError):
            return text
        place = place_of(failure)
        text, log = " ".join(filter(None, (text, place))), log_traceback(str(failure), failure, place)
        return f"{text}. {log}" if log else text

    def _model(self, name: str) -> Any:
        if name not in self._models:
            model = construct(self._registry, Kind.REWARD_MODEL, name, self._settings.options, self._settings.run)
            if isinstance(model, _ScoresEach) and model.scores_each:
                self.send("scores_each", name=name)  # before scoring, which may end the process
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
