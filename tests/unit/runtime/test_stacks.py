"""Stacks of the threads and tasks of a process, as text."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable

from slime_core.runtime.actors import process_stacks, show_tasks, task_stacks, thread_stacks


def shown(stacks: Callable[[], str], words: str) -> str:
    """The stacks once they hold ``words``: a thread that was started has not come anywhere yet."""
    text, deadline_s = "", time.monotonic() + 600
    while words not in text and time.monotonic() < deadline_s:
        text = stacks()
    return text


def test_a_waiting_thread_is_shown_where_it_waits_and_the_asking_one_is_not() -> None:
    release = threading.Event()

    def stuck() -> None:
        release.wait()

    thread = threading.Thread(target=stuck, name="reader")
    thread.start()
    text = shown(thread_stacks, "in stuck\n    release.wait()")
    release.set()
    thread.join()
    assert "thread reader:\n" in text
    assert "in stuck\n    release.wait()" in text
    assert "test_a_waiting_thread" not in text.replace("in stuck", "").split("thread reader")[0]


async def inner() -> None:
    await asyncio.sleep(3600)


async def test_a_task_is_shown_through_everything_it_awaits() -> None:
    async def outer() -> None:
        await inner()

    show_tasks()
    task = asyncio.create_task(outer(), name="outer")
    await asyncio.sleep(0)
    text = task_stacks()
    task.cancel()
    expected = ["task outer:", "in outer\n    await inner()", "in inner\n    await asyncio.sleep"]
    positions = [text.index(part) for part in expected]
    assert positions == sorted(positions)


async def test_tasks_that_wait_at_one_place_are_reported_once() -> None:
    show_tasks()
    tasks = [asyncio.create_task(inner(), name=f"sample-{number}") for number in range(3)]
    await asyncio.sleep(0)
    text = task_stacks()
    for task in tasks:
        task.cancel()
    assert text.count("in inner\n") == 1
    assert "and 2 more like it:\n" in text


def test_tasks_of_another_threads_loop_are_seen() -> None:
    running: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def far() -> None:
        show_tasks()
        seen = asyncio.Event()
        running.put((asyncio.get_running_loop(), seen))
        await seen.wait()

    thread = threading.Thread(target=asyncio.run, args=(far(),))
    thread.start()
    loop, seen = running.get(timeout=60)
    text = shown(task_stacks, "in far")
    loop.call_soon_threadsafe(seen.set)
    thread.join()
    assert "in far\n    await seen.wait()" in text


def test_asking_for_stacks_leaves_what_other_threads_build_alone() -> None:
    """``tuple(generator)``, with which torch imports modules, fails when anything else refers to its result."""
    done = threading.Event()
    lengths: list[int] = []

    def build() -> None:
        while not done.is_set():
            lengths.append(len(tuple(time.sleep(0.0002) or number for number in range(11))))

    thread = threading.Thread(target=build)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)  # the threads take turns in the middle of everything
    thread.start()
    deadline_s = time.monotonic() + 2
    while thread.is_alive() and time.monotonic() < deadline_s:
        process_stacks()
    alive = thread.is_alive()
    done.set()
    thread.join()
    sys.setswitchinterval(interval_s)
    assert alive
    assert set(lengths) == {11}
