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

from slime_core.rollout.engines.supervisor import SHARED, supervised
from tests.processes import DELIVERED_S, left_of

# Two processes have the file in memory; the second ignores SIGTERM and is in a session of its own. Says both, and where
# the folder for temporary files is.
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

PARENT = """
import os, subprocess, sys, time
from slime_core.rollout.engines.supervisor import die_with
parent = os.getpid()
keeper = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: die_with(parent))
print(keeper.pid, keeper.stdout.readline(), end="", flush=True)
time.sleep(600)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    path = SHARED / f"slime-test-{os.getpid()}-own"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """Is in nobody's memory."""
    path = SHARED / f"slime-test-{os.getpid()}-foreign"
    path.touch()
    yield path
    path.unlink()


def under_keeper(shared: Path, ending: str) -> list[str]:
    pattern = f"slime-test-{os.getpid()}-*"
    return supervised(pattern, [sys.executable, "-c", PROGRAM, str(shared), ending])


def assert_gone(shared: Path, foreign: Path, said: str) -> None:
    *pids, scratch = said.split()
    assert left_of(*map(int, pids)) == []
    # Whoever clears up may outlive what it clears up, and the one who stood before it.
    assert remaining(shared, Path(scratch)) == []
    assert foreign.exists()


def remaining(*paths: Path) -> list[Path]:
    """Those that are there still when they could have gone."""
    deadline_s = time.monotonic() + DELIVERED_S
    while (found := [path for path in paths if path.exists()]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -11)],
)
def test_the_end_of_a_program_is_passed_on_when_all_of_it_is_gone(
    shared: Path, foreign: Path, ending: str, code: int
) -> None:
    with subprocess.Popen(under_keeper(shared, ending), stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
    assert keeper.returncode == code
    assert_gone(shared, foreign, said)


def test_a_supervisor_that_is_terminated_kills_all_at_once(shared: Path, foreign: Path) -> None:
    ending = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen(under_keeper(shared, ending), stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        said, _ = keeper.stdout.readline(), keeper.stdout.readline()
        keeper.terminate()
    assert keeper.returncode == -signal.SIGTERM
    assert_gone(shared, foreign, said)


def test_a_parent_that_is_killed_leaves_neither_processes_nor_files(shared: Path, foreign: Path) -> None:
    command = [sys.executable, "-c", PARENT, *under_keeper(shared, "time.sleep(600)")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = parent.stdout.readline()
        parent.kill()
    assert_gone(shared, foreign, said)


def test_one_that_is_killed_by_ray_leaves_nothing_either(shared: Path, foreign: Path) -> None:
    with subprocess.Popen(under_keeper(shared, "time.sleep(600)"), stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        keeper.kill()
    assert_gone(shared, foreign, said)


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    ended = subprocess.run(supervised("none", ["/no/such/program"]), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        127,
        "/no/such/program: [Errno 2] No such file or directory: '/no/such/program'\n",
    )
