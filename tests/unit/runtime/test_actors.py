"""The process of an actor: its garbage, its output and its stacks."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slime_core.runtime.actors import process_stacks, show_tasks, task_stacks, thread_stacks, uncollected


def test_garbage_is_looked_for_after_the_block_and_no_more_in_what_it_made() -> None:
    before = gc.get_threshold()
    try:
        with uncollected():
            asleep, made = not gc.isenabled(), [[]]
        assert (asleep, gc.isenabled(), gc.get_threshold()) == (True, True, before)
        assert not any(one is made for one in gc.get_objects())
        with uncollected(allocations=5_000):
            pass
        assert gc.get_threshold()[0] == 5_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


PRINTS = """
import logging, pathlib, sys
from slime_core.runtime.actors import keep_output

keep_output(pathlib.Path(sys.argv[1]))
print("on stdout")
print("on stderr", file=sys.stderr)
logging.getLogger("mine").info("as information")
logging.getLogger("mine").warning("as a warning")
"""


def prints(log: Path) -> tuple[str, str]:
    """What a process prints that keeps its output in ``log``."""
    ended = subprocess.run([sys.executable, "-c", PRINTS, log], capture_output=True, text=True, check=True)
    return ended.stdout, ended.stderr


def test_output_and_logs_of_a_process_are_copied_into_its_file(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "sampler.log"
    stdout, stderr = prints(log)
    assert stdout == "on stdout\n"
    assert stderr.startswith("on stderr\n")
    assert " WARNING mine: as a warning" in stderr
    assert "information" not in stderr
    first, second, *records = log.read_text().splitlines()
    assert (first, second) == ("on stdout", "on stderr")
    assert [record.split(" ", 2)[2] for record in records] == [
        "INFO mine: as information",
        "WARNING mine: as a warning",
    ]
    prints(log)
    assert len(log.read_text().splitlines()) == 8


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stdout, stderr = prints(tmp_path / "file" / "sampler.log")
    assert stdout == "on stdout\n"
    assert re.match(rf"warning: {tmp_path}/file/sampler\.log .*\(\[Errno ", stderr)


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
