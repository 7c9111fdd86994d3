"""A child process that says what became of it, and that never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from slime_core.errors import EngineError
from slime_core.rollout.engines.server import Server
from tests.processes import children, left_of


class Program(Server):
    """Runs a command, which need not listen."""

    probe = "/"

    def __init__(self, folder: Path, *words: str) -> None:
        log = folder / "logs" / "engine.log"
        super().__init__("engine 0", host="127.0.0.1", env=dict(os.environ), log_file=log, start_timeout_s=60.0)
        self.words = list(words)

    def command(self, port: int, second: int) -> list[str]:
        return self.words


def shell(tmp_path: Path, script: str) -> Program:
    server = Program(tmp_path, "/bin/sh", "-c", script)
    server.start()
    return server


def first_line(server: Program) -> str:
    """What it prints first, once it has."""
    while not server.last_lines():
        time.sleep(0.02)
    return server.last_lines()[0]


def test_a_death_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    server = shell(tmp_path, "seq 1 30; echo out of memory >&2; exit 3")
    assert server.wait_end(120)
    with pytest.raises(EngineError, match=r"^engine 0 .* code 3") as death:
        server.check_alive()
    _, where, *last = str(death.value).splitlines()
    assert str(server.log_file) in where
    assert last == [*(f"  {number}" for number in range(12, 31)), "  out of memory"]


def test_a_signal_is_named(tmp_path: Path) -> None:
    server = shell(tmp_path, "kill -9 $$")
    server.wait_end(120)
    with pytest.raises(EngineError, match=rf"^engine 0 .* signal 9 \(SIGKILL\).*\n.* {server.log_file}\.$"):
        server.check_alive()


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="/no/such/program"):
        Program(tmp_path, "/no/such/program").start()


def test_stopping_ends_children_that_ignore_it_and_twice_is_fine(tmp_path: Path) -> None:
    server = shell(tmp_path, "trap '' TERM; sleep 600 & echo $!; wait; sleep 600")
    child = int(first_line(server))
    server.stop()
    server.stop()
    assert left_of(child) == []


def test_stopping_what_was_never_started_does_nothing(tmp_path: Path) -> None:
    Program(tmp_path, "sleep", "60").stop()


def test_a_start_after_a_stop_is_refused(tmp_path: Path) -> None:
    server = Program(tmp_path, "sleep", "60")
    server.stop()
    assert server.wait_end(0)
    with pytest.raises(EngineError, match="engine 0 was stopped"):
        server.start()
    assert not server.is_alive()


def test_a_stop_that_crosses_a_start_leaves_nothing(tmp_path: Path) -> None:
    for number in range(20):
        mark = f"60.{os.getpid()}{number}"
        server = Program(tmp_path, "sleep", mark)
        starter = threading.Thread(target=_start_anyway, args=(server,))
        starter.start()
        time.sleep(number * 0.0005)
        server.stop()
        starter.join()
        assert children(mark) == []


def _start_anyway(server: Program) -> None:
    with suppress(EngineError):
        server.start()


def test_a_program_that_has_ended_can_be_started_again(tmp_path: Path) -> None:
    server = shell(tmp_path, "exit 1")
    assert server.wait_end(120)
    server.words = ["sleep", "60"]
    server.start()
    assert server.is_alive()
    server.stop()


PARENT = """
import os, sys, threading, time
from pathlib import Path
from slime_core.rollout.engines.server import Server
class Sleep(Server):
    def command(self, port, second):
        return ["sleep", "600"]
server = Sleep("s", host="127.0.0.1", env=dict(os.environ), log_file=Path(sys.argv[1]), start_timeout_s=60)
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
time.sleep(0.3)
print(server._process.pid, server.is_alive(), flush=True)
time.sleep(600)
"""


def test_a_killed_parent_takes_its_server_along_but_a_finished_thread_does_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"
        parent.send_signal(signal.SIGKILL)
        assert left_of(int(pid)) == []
