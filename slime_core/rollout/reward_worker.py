"""The program of one reward worker: scores what its parent sends, in a process that can be killed.

    parent -> worker    a pickled (call, reward model, samples), which only the parent writes
    worker -> parent    JSON: {"ready": true}, {"begun": call}, {"done": call, "rewards": [...]},
                        {"failed": call, "cause": ..., "error": ...}, {"broken": why it cannot work at all}

Calls run concurrently in one event loop, so that rewards which wait for a network overlap. "begun" is sent when a call
really starts to run: its time counts from there, whatever else had the loop before.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import resource
import socket
import sys
from typing import Any

from slime_core.errors import SlimeError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registration import Registry

__all__ = ["main", "read_frame", "write_frame"]

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
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


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


class _Worker:
    """The reward models that were asked for so far."""

    def __init__(self, setup: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        limit = setup["memory_bytes"]
        # Private memory, not address space: libraries reserve far more of that than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._registry: Registry = attach(Manifest.from_json(setup["manifest"]))
        self._options: dict[str, Any] = pickle.loads(setup["options"])
        self._timeout_s: float = setup["timeout_s"]
        self._writer = writer
        self._models: dict[str, Any] = {}

    def say(self, **message: Any) -> None:
        _say(self._writer, **message)

    async def run(self, call: int, name: str, samples: list[Any]) -> None:
        self.say(begun=call)
        try:
            # Whatever a reward raises costs the samples of this call, and says so with its own words.
            with boundary(f"reward model {name!r}", "scoring"):
                async with asyncio.timeout(self._timeout_s):
                    rewards = await self._model(name).score(samples)
            self.say(done=call, rewards=list(rewards))
        except SlimeError as error:
            self.say(failed=call, cause=_cause(error.__cause__), error=str(error.__cause__ or error) or str(error))
        except TypeError as error:
            self.say(failed=call, cause="invalid", error=f"rewards that are no numbers: {error}")

    def _model(self, name: str) -> Any:
        if name not in self._models:
            owner = self._registry.owner(Kind.REWARD_MODEL, name)
            self._models[name] = self._registry.load(Kind.REWARD_MODEL, name)(self._options.get(owner.name))
        return self._models[name]


def _cause(error: BaseException | None) -> str:
    known = {TimeoutError: "timeout", MemoryError: "memory"}
    return next((cause for kind, cause in known.items() if isinstance(error, kind)), type(error).__name__)


if __name__ == "__main__":
    main()
