"""Stacks of all threads and asyncio tasks of this process, as text."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from types import CoroutineType, FrameType
from typing import Any

__all__ = ["process_stacks", "task_stacks", "thread_stacks"]

DEEPEST = 12
"""Innermost frames kept of one stack: enough to leave a library's event loop and reach its caller."""

SCAFFOLDING = ("/site-packages/ray/", "/threading.py", "/asyncio/runners.py", "/asyncio/base_events.py")
"""Files whose frames are left out, because every stack has them; a thread or task without other frames is idle."""


def process_stacks() -> str:
    """The stacks of all threads, then of all unfinished asyncio tasks, of this process."""
    return "\n".join(part for part in (thread_stacks(), task_stacks()) if part)


def thread_stacks() -> str:
    """The stack of every busy thread but the calling one, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    caller = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != caller}
    stacks = {names.get(ident, str(ident)): _frames(frame) for ident, frame in frames.items()}
    return "\n".join(f"thread {name}:\n{stack}" for name, stack in stacks.items() if stack)


def task_stacks() -> str:
    """Where every unfinished asyncio task of this process is suspended, over all event loops; tasks that
    wait at the same place are listed once, with their number."""
    waiting: dict[str, list[str]] = {}
    for task in _tasks():
        waiting.setdefault("".join(_suspended(task)).rstrip(), []).append(task.get_name())
    return "\n".join(f"{_names(names)}:\n{stack}" for stack, names in waiting.items() if stack)


def _names(tasks: list[str]) -> str:
    return f"task {tasks[0]}" if len(tasks) == 1 else f"task {tasks[0]} and {len(tasks) - 1} more like it"


def _tasks() -> list[asyncio.Task[Any]]:
    # asyncio.all_tasks() sees one loop, and an actor has one for each concurrency group, each in its own thread.
    return [found for found in gc.get_objects() if type(found) is asyncio.Task and not found.done()]


def _suspended(task: asyncio.Task[Any]) -> Iterator[str]:
    waiting: object = task.get_coro()
    for _ in range(DEEPEST):
        frame = waiting.cr_frame if isinstance(waiting, CoroutineType) else None
        if frame is not None and _is_shown(frame.f_code.co_filename):
            yield _line(frame)
        waiting = _awaited(waiting)


def _awaited(waiting: object) -> object:
    # Ray runs an actor's coroutine inside a compiled one, which has no frame but knows what it awaits: a wrapper (or a
    # task) that only the collector can look into.
    found: object = getattr(waiting, "cr_await", None)
    if found is None or isinstance(found, CoroutineType):
        return found
    return next((inner for inner in gc.get_referents(found) if isinstance(inner, CoroutineType)), found)


def _frames(frame: FrameType) -> str:
    shown = [entry for entry in traceback.extract_stack(frame) if _is_shown(entry.filename)]
    return "".join(traceback.format_list(shown[-DEEPEST:])).rstrip()


def _is_shown(filename: str) -> bool:
    return not any(part in filename for part in SCAFFOLDING)


def _line(frame: FrameType) -> str:
    info = inspect.getframeinfo(frame, context=1)
    source = "".join(info.code_context or ()).strip()
    return f'  File "{info.filename}", line {info.lineno}, in {info.function}\n    {source}\n'
