"""The program of one reward worker: scores what its parent sends, in a process that can be killed.

    parent -> worker    a pickled (call, reward model, samples), which only the parent writes
    worker -> parent    JSON: {"ready": true}, {"begun": call}, {"idle": call}, {"done": call, "rewards": [...]},
                        {"failed": call, "cause": ..., "error": ...}, {"broken": why it cannot work at all}

Behind the process that the parent starts stands a keeper: it forks the one that works, adopts whatever that leaves
behind, and ends it all when the parent asks for it, or has gone.

Calls run concurrently in one event loop, so that rewards which wait for a network overlap. "begun" is sent when a call
really starts to run: its time counts from there, whatever else had the loop before. "idle" is sent when the loop has
its turn again: the call waits for something, and another can run beside it.
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
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import psutil  # type: ignore[import-untyped]

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import RunView
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registration import Registry
from slime_core.rollout.engines.supervisor import HANDLED, LIBC, die_with, fork_behind_proxy

__all__ = ["main", "read_frame", "write_frame"]

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""

LAST_S = 1.0
"""Seconds in which killed processes are gone; a signal is delivered some time after it was sent."""

LIMITS: dict[type[BaseException], str] = {TimeoutError: "timeout", MemoryError: "memory"}
"""What is raised in a process at its limits -> the cause that it is counted under."""

LARGEST_ANSWER = 2**24
"""Bytes of what one call gives; more is no reward, and the sampler holds it all."""

LONGEST_ERROR = 2000
"""Characters of what a reward raises that its sample says."""

HEAD = 8
"""Bytes of a frame's length, big-endian."""


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError: the other side has gone.
    """
    return await reader.readexactly(int.from_bytes(await reader.readexactly(HEAD)))


def write_frame(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send one frame; it has left this process when the call returns, unless much is waiting to be sent."""
    writer.write(len(content).to_bytes(HEAD) + content)


def main() -> None:
    """Serve the socket whose descriptor is the first argument until the parent closes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    fork_behind_proxy()
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    # Descendants whose own parent ends become children of the keeper, whatever session they are in.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper, worker = os.getpid(), os.fork()
    if worker == 0:
        die_with(keeper)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _keep_from_children(connection)
        asyncio.run(_serve(connection))
    else:
        connection.close()
        _keep(worker)


def _keep_from_children(connection: socket.socket) -> None:
    """A process that a reward forks can neither take the parent's words nor answer in its place."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, connection.fileno()))


def _keep(worker: int) -> None:
    while os.waitpid(-1, 0)[0] != worker:
        continue
    _leave()


def _leave() -> None:
    """End with all descendants; stopped first, so that none of them starts another meanwhile."""
    children: list[psutil.Process] = []
    for what in (signal.SIGSTOP, signal.SIGKILL):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(what)
    psutil.wait_procs(children, timeout=LAST_S)
    os._exit(0)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        worker = _Worker(pickle.loads(await read_frame(reader)), writer)
    except SlimeError as error:
        _say(writer, broken=str(error))
        await writer.drain()
        return
    worker.say(ready=True)
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            frame = await read_frame(reader)
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(worker.run(*pickle.loads(frame)))
        running.add(task)
        task.add_done_callback(running.discard)


def _say(writer: asyncio.StreamWriter, **message: Any) -> None:
    write_frame(writer, json.dumps(message).encode())


@runtime_checkable
class _Apart(Protocol):
    """A reward model of whole groups that knows once it is made whether it scores each sample by itself."""

    scores_each: bool


class _Worker:
    """The reward models that were asked for so far."""

    def __init__(self, setup: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        limit = setup["memory_bytes"]
        # Private memory, not address space: libraries reserve far more of that than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._registry: Registry = attach(Manifest.from_json(setup["manifest"]))
        self._options: dict[str, Any] = pickle.loads(setup["options"])
        self._run_view = RunView.from_json(setup["run"])
        self._timeout_s: float = setup["timeout_s"]
        self._writer, self._process = writer, os.getpid()
        self._models: dict[str, Any] = {}

    def say(self, **message: Any) -> None:
        _say(self._writer, **message)

    async def run(self, call: int, name: str, samples: list[Any]) -> None:
        try:
            await self._run(call, name, samples)
        finally:
            if os.getpid() != self._process:  # what a reward has forked goes no further than the reward
                os._exit(0)

    async def _run(self, call: int, name: str, samples: list[Any]) -> None:
        self.say(begun=call)
        asyncio.get_running_loop().call_soon(lambda: self.say(idle=call))
        try:
            # Whatever a reward raises costs the samples of this call, and says so with its own words.
            with boundary(f"reward model {name!r}", "scoring"):
                async with asyncio.timeout(self._timeout_s):
                    rewards = await self._model(name).score(samples)
                answer = json.dumps({"done": call, "rewards": [_plain(reward) for reward in rewards]}).encode()
                if len(answer) > LARGEST_ANSWER:
                    raise ValueError(f"the rewards of one call take more than {LARGEST_ANSWER} bytes")
            write_frame(self._writer, answer)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt) as error:
            # Nobody cancels a call here, so the reward did, as `await task` does of a task that was cancelled.
            self.say(failed=call, cause=type(error).__name__, error=f"it raised {type(error).__name__}")
        except SlimeError as error:
            cause = _cause(error.__cause__)
            # Limits raise without a word; whose they are and what they are, the parent knows.
            own = str(error.__cause__ or error) or ("" if cause in LIMITS.values() else str(error))
            # Half a surrogate pair, as JSON of a response may give, can be written into no file.
            said = own[:LONGEST_ERROR].encode("utf-8", "backslashreplace").decode()
            self.say(failed=call, cause=cause, error=said)

    def _model(self, name: str) -> Any:
        if name not in self._models:
            model = construct(self._registry, Kind.REWARD_MODEL, name, self._options, self._run_view)
            if isinstance(model, _Apart) and model.scores_each:
                self.say(apart=name)  # now: what it does next may end the process
            self._models[name] = model
        return self._models[name]


def _plain(reward: Any) -> Any:
    """The reward as JSON has it: numbers of numpy and torch become numbers, what is none becomes text."""
    if isinstance(reward, dict):
        return {str(name): _plain(value) for name, value in reward.items()}
    if isinstance(reward, numbers.Real):
        return float(reward)
    if hasattr(reward, "item") and getattr(reward, "ndim", None) == 0:
        return float(reward.item())
    return None if reward is None else f"{reward if isinstance(reward, str) else repr(reward):.200}"


def _cause(error: BaseException | None) -> str:
    while isinstance(error, SlimeError) and error.__cause__ is not None:  # an adapter's words around the function's own
        error = error.__cause__
    if isinstance(error, PluginError):  # an adapter refuses what the function returned
        return "invalid"
    return next((cause for kind, cause in LIMITS.items() if isinstance(error, kind)), type(error).__name__)


if __name__ == "__main__":
    main()
