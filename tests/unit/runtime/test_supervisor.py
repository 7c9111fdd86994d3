"""Whatever ends a server, or the process that started it, its files and its descendants are gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_core.runtime.supervisor import SHARED, supervised
from tests.processes import DELIVERED_S, left_of

# Two processes have the file in memory; the second ignores SIGTERM and is in a session of its own. Prints both
# ids and the folder for temporary files.
PROGRAM = """
import mmap, os, signal, sys, time
with open(sys.argv[1], "w+b") as file:
    file.write(b"x")
    file.flush()
    held = mmap.mmap(file.fileno(), 1)
open(os.environ["TMPDIR"] + "/socket", "w").close()
other = os.fork()
if other == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.setsid()
    time.sleep(600)
print(os.getpid(), other, os.environ["TMPDIR"], flush=True)
exec(sys.argv[2])
"""

# What an SGLang scheduler does: changes a variable, then names its process.
NAMED = """
import os
os.environ["FIRST"] = "a longer value"
import setproctitle
setproctitle.setproctitle("sglang::scheduler")
print(open("/proc/self/cmdline").read().rstrip("\\0"))
"""

PARENT = """
import os, subprocess, sys, time
from slime_core.runtime.supervisor import die_with
parent = os.getpid()
supervisor = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: die_with(parent))
print(supervisor.pid, supervisor.stdout.readline(), end="", flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    path = SHARED / f"slime-test-{os.getpid()}-own"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """No process has it in memory."""
    path = SHARED / f"slime-test-{os.getpid()}-foreign"
    path.touch()
    yield path
    path.unlink()


def under_supervisor(shared: Path, ending: str) -> list[str]:
    pattern = f"slime-test-{os.getpid()}-*"
    return supervised(pattern, [sys.executable, "-c", PROGRAM, str(shared), ending])


def assert_gone(shared: Path, foreign: Path, output: str) -> None:
    *pids, scratch = output.split()
    assert left_of(*map(int, pids)) == []
    # The supervisor may outlive the processes it kills, and its proxy.
    assert remaining(shared, Path(scratch)) == []
    assert foreign.exists()


def remaining(*paths: Path) -> list[Path]:
    """Those that exist after :data:`DELIVERED_S`; returns as soon as none does."""
    deadline_s = time.monotonic() + DELIVERED_S
    while (found := [path for path in paths if path.exists()]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("ending", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -11)]
)
def test_the_end_of_a_program_is_passed_on_when_all_of_it_is_gone(
    shared: Path, foreign: Path, ending: str, code: int
) -> None:
    with subprocess.Popen(under_supervisor(shared, ending), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        output = supervisor.stdout.readline()
    assert supervisor.returncode == code
    assert_gone(shared, foreign, output)


def test_a_supervisor_that_is_terminated_kills_all_at_once(shared: Path, foreign: Path) -> None:
    ending = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen(under_supervisor(shared, ending), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        output, _ = supervisor.stdout.readline(), supervisor.stdout.readline()
        supervisor.terminate()
    assert supervisor.returncode == -signal.SIGTERM
    assert_gone(shared, foreign, output)


def test_a_parent_that_is_killed_leaves_neither_processes_nor_files(shared: Path, foreign: Path) -> None:
    command = [sys.executable, "-c", PARENT, *under_supervisor(shared, "time.sleep(600)")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        output = parent.stdout.readline()
        parent.kill()
    assert_gone(shared, foreign, output)


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    ended = subprocess.run(supervised("none", ["/no/such/program"]), capture_output=True, text=True, check=False)
    assert ended.returncode == 127
    assert ended.stderr.startswith("/no/such/program: [Errno 2]")
    assert ended.stderr.count("\n") == 1


def test_a_process_gets_its_name_when_the_first_variable_of_the_environment_changes() -> None:
    command = supervised("none", [sys.executable, "-c", NAMED])
    environment = {"FIRST": "1", "PATH": os.environ["PATH"]}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.strip() == "sglang::scheduler"


def test_a_supervisor_that_is_killed_leaves_neither_processes_nor_files(shared: Path, foreign: Path) -> None:
    with subprocess.Popen(under_supervisor(shared, "time.sleep(600)"), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        output = supervisor.stdout.readline()
        supervisor.kill()
    assert_gone(shared, foreign, output)
