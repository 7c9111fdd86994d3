"""The program between an actor and its inference server, which clears up after the server however either of them ends.

    python -I -S keeper.py PATTERN COMMAND ...

runs COMMAND with a folder for temporary files of its own. Files in /dev/shm whose name matches PATTERN, and that a
process of the command has had in memory, are removed at the end, and so is the folder: SGLang leaves both behind, 16 KB
an engine, and 25 MB where an engine has several processes. The end is that of the command, whose exit code or signal is
passed on; or SIGTERM, which the kernel sends too when the actor has died: then the command and all its descendants are
killed at once. (SGLang takes 4.5 s to end by itself, with or without work, and has nothing to save.)

Ray kills the children of a worker that ends, by SIGKILL, and not theirs (KillChildProcs in its core worker). So what
the actor starts only stands before the keeper, which hears SIGTERM from the kernel when it has gone.

Needs the standard library only and starts in 20 ms, because nothing else is imported.
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

__all__ = ["HEARD", "die_with", "keep", "kept", "stand_before"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None)

HEARD = {signal.SIGCHLD, signal.SIGTERM}
"""Signals that a keeper waits for."""
SHARED = Path("/dev/shm")
LOOK_S = 0.2
"""Seconds between two looks for files; a file that is younger when all processes die at once stays."""

GONE_S = 3.0
"""Seconds in which killed processes have gone."""


def kept(pattern: str, command: Sequence[str]) -> list[str]:
    """``command`` under a keeper."""
    return [sys.executable, "-I", "-S", __file__, pattern, *command]


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when the thread of ``parent`` that started it ends; for ``preexec_fn``, too."""
    LIBC.prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def keep(pattern: str, command: Sequence[str]) -> None:
    """Run ``command`` to its end, clear up, and end as it did."""
    stand_before()
    # Descendants whose own parent ends become children of this process.
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    scratch = tempfile.mkdtemp(prefix="slime-")  # short: a socket's path has at most 107 characters
    before, files = _names(pattern), set[Path]()
    program = _start(command, scratch)
    status, heard = None, None
    while status is None and (heard is None or heard.si_signo != signal.SIGTERM):
        heard = signal.sigtimedwait(HEARD, LOOK_S)
        files |= _shared(files, pattern, before)
        status = _collected(program)
    _kill_descendants()
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    _end_as(status)


def stand_before() -> None:
    """Returns in a child, with :data:`HEARD` blocked; this process passes SIGTERM on to it, and ends as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    before, keeper = os.getpid(), os.fork()
    if keeper == 0:
        die_with(before, signal.SIGTERM)
        return
    while (status := _collected(keeper)) is None:
        if signal.sigwaitinfo(HEARD).si_signo == signal.SIGTERM:
            os.kill(keeper, signal.SIGTERM)
    _end_as(status)


def _start(command: Sequence[str], scratch: str) -> int:
    keeper, program = os.getpid(), os.fork()
    if program == 0:
        die_with(keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        try:
            os.execve(command[0], list(command), {**os.environ, "TMPDIR": scratch})
        except OSError as problem:
            print(f"{command[0]}: {problem}", file=sys.stderr, flush=True)
            os._exit(127)
    return program


def _collected(program: int) -> int | None:
    """How the program ended (wait(2)); None: it runs. Whoever else was a child of this process is collected too."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == program:
                return found[1]
    return None


def _names(pattern: str) -> set[str]:
    return {name for name in os.listdir(SHARED) if fnmatch(name, pattern)} if SHARED.is_dir() else set()


def _shared(known: set[Path], pattern: str, before: set[str]) -> set[Path]:
    """New files that a descendant has in memory."""
    new = _names(pattern) - before - {path.name for path in known}
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
    found = [os.getpid()]
    for pid in found:  # grows meanwhile
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> Iterator[tuple[int, int]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            # The name, in brackets, may hold anything; behind it: state, parent (proc_pid_stat(5)).
            yield int(name), int(stat.read().rpartition(")")[2].split()[1])


def _kill_descendants() -> None:
    deadline_s = time.monotonic() + GONE_S
    while (found := _descendants()) and time.monotonic() < deadline_s:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _collected(0)
        time.sleep(LOOK_S / 20)


def _end_as(status: int | None) -> None:
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGTERM if status is None else os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has dumped its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    with suppress(OSError):  # SIGKILL has no other handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2:])
