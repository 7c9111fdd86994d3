"""The program between an actor and its inference server; it cleans up after the server, however either of them ends.

    python -I -S supervisor.py PATTERN COMMAND ...

runs COMMAND with a separate folder for temporary files. At the end it removes that folder, and the files in /dev/shm
whose name matches PATTERN and that a process of the command has mapped: SGLang removes neither, 16 KB an engine, and 25
MB if an engine has several processes. When the command ends, the supervisor passes on its exit code or signal. On
SIGTERM, which the kernel also sends when the actor dies, it kills the command and all its descendants at once. (SGLang
takes 4.5 s to end by itself, with or without work, and has nothing to save.)

Ray kills the children of a worker that ends by SIGKILL, but not their children (KillChildProcs in its core worker). So
the actor starts a proxy process, and the supervisor is the proxy's child: it gets SIGTERM from the kernel when the
proxy dies.

    python -I -S supervisor.py --with-raylet COMMAND ...

becomes COMMAND, one of Ray's agents, which the kernel kills when its raylet ends. Ray's agents look for their raylet by
themselves, and on a busy machine notice its end more than a minute later.

Only the standard library is imported, so it starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None)

WITH_RAYLET = "--with-raylet"

HANDLED = {signal.SIGCHLD, signal.SIGTERM}
"""Signals that a supervisor waits for."""
SHARED = Path("/dev/shm")
LOOK_S = 0.2
"""Seconds between two scans for files; a younger file remains if all processes die at once."""

GONE_S = 3.0
"""Seconds to wait for killed processes."""


def supervised(pattern: str, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` under a supervisor."""
    return [sys.executable, "-I", "-S", __file__, pattern, *command]


def with_raylet() -> list[str]:
    """The words before the command of an agent of Ray's that the kernel ends with its raylet."""
    return [sys.executable, "-I", "-S", __file__, WITH_RAYLET]


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send ``by`` to this process when the thread of ``parent`` that started it ends; works as
    ``preexec_fn``."""
    LIBC.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def supervise(pattern: str, command: Sequence[str]) -> None:
    """Run ``command`` to its end, clean up, and end with its exit status."""
    fork_with_proxy()
    # Descendants whose own parent ends become children of this process.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    scratch = tempfile.mkdtemp(prefix="slime-")  # short: a socket's path has at most 107 characters
    before, files = _names(pattern), set[Path]()
    program = _start(command, scratch)
    status, heard = None, None
    while status is None and (heard is None or heard.si_signo != signal.SIGTERM):
        heard = signal.sigtimedwait(HANDLED, LOOK_S)
        files |= _new_shared_files(files, pattern, before)
        status = _reaped(program)
    _kill_descendants()
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    _end_as(status)


def fork_with_proxy() -> None:
    """Fork and return in the child, with :data:`HANDLED` blocked; the parent forwards SIGTERM and ends as the child
    does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    proxy, child = os.getpid(), os.fork()
    if child == 0:
        die_with(proxy, signal.SIGTERM)
        return
    while (status := _reaped(child)) is None:
        if signal.sigwaitinfo(HANDLED).si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
    _end_as(status)


def _start(command: Sequence[str], scratch: str) -> int:
    supervisor, program = os.getpid(), os.fork()
    if program == 0:
        die_with(supervisor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        # setproctitle, which SGLang names its processes with, has no effect once the first variable of the environment
        # has changed; Ray passes variables in random order, and SGLang changes some of them. It never changes TMPDIR.
        environment = {"TMPDIR": scratch} | {**os.environ, "TMPDIR": scratch}
        try:
            os.execve(command[0], list(command), environment)
        except OSError as problem:
            print(f"{command[0]}: {problem}", file=sys.stderr, flush=True)
            os._exit(127)
    return program


def _reaped(program: int) -> int | None:
    """Return the exit status of the program (wait(2)), or None if it runs; reap all other children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return ended[1]
    return None


def _names(pattern: str) -> set[str]:
    return {name for name in os.listdir(SHARED) if fnmatch(name, pattern)} if SHARED.is_dir() else set()


def _new_shared_files(files: set[Path], pattern: str, before: set[str]) -> set[Path]:
    """Return further files that a descendant has mapped."""
    new = _names(pattern) - before - {path.name for path in files}
    if not new:
        return set()
    mapped = {path for pid in _descendants() for path in _mapped(pid)}
    return {SHARED / name for name in new if str(SHARED / name) in mapped}


def _mapped(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
        # address perms offset dev inode path; anonymous memory has no path (proc_pid_maps(5))
        yield from (parts[5].rstrip("\n") for line in lines if len(parts := line.split(maxsplit=5)) == 6)


def _descendants() -> list[int]:
    parents = dict(_parents())
    pids = [os.getpid()]
    for pid in pids:  # the list grows while it is read
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            # The name, in brackets, may hold anything; after it: state, parent (proc_pid_stat(5)).
            yield int(name), int(stat.read().rpartition(")")[2].split()[1])


def _kill_descendants() -> None:
    deadline_s = time.monotonic() + GONE_S
    while (pids := _descendants()) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reaped(0)
        time.sleep(LOOK_S / 20)


def _end_as(status: int | None) -> None:
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGTERM if status is None else os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has dumped core
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    with suppress(OSError):  # SIGKILL has no other handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    pattern, *command = sys.argv[1:]
    if pattern == WITH_RAYLET:
        die_with(int(os.environ.get("RAY_RAYLET_PID", os.getppid())))  # the exec below keeps it (prctl(2))
        os.execv(command[0], command)
    supervise(pattern, command)
