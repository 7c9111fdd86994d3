"""The program of a reward process: scores the samples that the sampler sends.

Calls run concurrently in one event loop, so that rewards which wait for a network overlap.

    sampler -> process   once, pickled settings; then a pickled (call, reward model, samples) each
    process -> sampler   JSON, so that the sampler never unpickles output of user code; ``event`` is

        ready        the process takes calls
        broken       the plugins cannot be loaded; ``error`` says why
        started      ``call`` starts to run; its time limit counts from there
        idle         the event loop has control again: ``call`` waits for something, and another call can run
        done         the ``rewards`` of ``call``
        failed       ``call`` has no rewards; ``cause``, ``error``
        scores_each  the reward model ``name`` of scope ``group`` can score each sample separately
"""

from __future__ import annotations

import asyncio
import json
import numbers
import pickle
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from slime_core.components.construction import construct
from slime_core.config.secrets import set_engine_access, without_queries
from slime_core.contracts import RunView
from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.user_code.failures import boundary, log_traceback, place_of, tracebacks_into

LENGTH_BYTES = 8
"""Bytes of a frame's length, big-endian."""

LIMITS: dict[type[BaseException], str] = {TimeoutError: "timeout", MemoryError: "memory"}
"""Exception at a limit -> the cause that metrics count."""

MAX_ERROR_CHARS = 2000
"""Characters of an exception's message that its sample keeps."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame.

    Raises:
        asyncio.IncompleteReadError: the other side has closed the connection.
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
        timeout_s: limit of one call in seconds.
        memory_gib: limit of the private memory of one process.
        log_file: receives the output of rewards. None: the output is discarded.
    """

    manifest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    run: RunView = field(default_factory=RunView)
    num_workers: int = 2
    timeout_s: float = 30.0
    memory_gib: float = 4.0
    log_file: Path | None = None


async def serve(connection: socket.socket) -> None:
    """Serve calls until the sampler closes ``connection``."""
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
    """A reward model of scope ``group`` that can score each sample separately."""

    scores_each: bool


class _Worker:
    """The reward models of this process, each constructed at its first call."""

    def __init__(self, setup: bytes, writer: asyncio.StreamWriter) -> None:
        manifest, access, settings = pickle.loads(setup)
        self._registry: Registry = attach(Manifest.from_json(manifest))
        set_engine_access(access)
        self._settings: RewardPoolSettings = pickle.loads(settings)
        limit = int(self._settings.memory_gib * 2**30)
        # RLIMIT_DATA counts private memory; libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._writer = writer
        self._models: dict[str, Any] = {}
        if self._settings.log_file is not None:
            with suppress(OSError):
                tracebacks_into(self._settings.log_file)

    def send(self, event: str, **details: Any) -> None:
        _send(self._writer, event, **details)

    async def run(self, call: int, name: str, samples: list[Any]) -> None:
        self.send("started", call=call)
        asyncio.get_running_loop().call_soon(lambda: self.send("idle", call=call))
        try:
            # An exception of the reward fails the samples of this call, with the message of that exception.
            with boundary(f"reward model {name!r}", "scoring"):
                async with asyncio.timeout(self._settings.timeout_s):
                    rewards = await self._model(name).score(samples)
                self.send("done", call=call, rewards=[_plain(reward) for reward in rewards])
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt) as error:
            # This program never cancels a call, so the reward did: `await task` of a cancelled task raises this.
            self.send("failed", call=call, cause=type(error).__name__, error=f"it raised {type(error).__name__}")
        except SlimeError as error:
            cause = _cause(error.__cause__)
            message = "" if cause in LIMITS.values() else self._located(error)
            # An unpaired surrogate, which the JSON of a response may hold, cannot be written to a file.
            text = without_queries(message)[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
            self.send("failed", call=call, cause=cause, error=text)

    def _located(self, error: SlimeError) -> str:
        """Return the message with the line of the reward's code that raised it, and the log with the traceback."""
        failure = error.__cause__
        text = str(failure or error) or str(error)
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
    """Return the reward for JSON: numpy and torch scalars become floats, anything else becomes text."""
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
    if isinstance(error, PluginError):  # the adapter refused the function's return value
        return "invalid"
    return next((cause for kind, cause in LIMITS.items() if isinstance(error, kind)), type(error).__name__)


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
