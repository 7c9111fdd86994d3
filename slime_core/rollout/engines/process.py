"""A server program as a child process that dies with its parent and leaves a log.

A thread of its own starts the program and waits for its end. The thread must live as long as the program: Linux sends
the parent-death signal when the *thread* that started a child ends, not its process (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_core.errors import EngineError
from slime_core.rollout.engines.supervisor import die_with

__all__ = ["ServerProcess"]

TERMINATE_GRACE_S = 3.0
"""The supervisor of an engine takes a tenth of that on an idle machine."""

KILL_GRACE_S = 3.0
LAST_LINES = 20
POLL_S = 0.05
TAIL_BYTES = 64 * 1024


class ServerProcess:
    """A command runs in a process group of its own from :meth:`start` to :meth:`stop`, or until its parent dies.

    ``stop`` may be called at any time, from any thread; it also ends a program that a concurrent ``start`` launches,
    and a later ``start`` fails.

    Arguments:
        name: for messages, ``"engine 0"``.
        env: its whole environment.
        log_file: receives its output; its folder is created.
    """

    def __init__(self, name: str, *, env: Mapping[str, str], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._env = dict(env)
        self._starting = threading.Lock()
        self._stopped = False
        self._started = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None

    def start(self, command: Sequence[str]) -> None:
        """Start the program; may be repeated after it has ended by itself.

        Arguments:
            command: program and arguments.

        Raises:
            EngineError: it cannot be executed, or was stopped before.
        """
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._starting:
            if self._stopped:
                raise EngineError(f"{self.name} was stopped before it was started")
            self._started.clear()
            self._ended.clear()
            threading.Thread(target=self._keep, args=(command,), name=f"{self.name} process", daemon=True).start()
            self._started.wait()
        if self._failure is not None:
            raise EngineError(f"{self.name} cannot be started with {command[0]}: {self._failure}")

    def is_alive(self) -> bool:
        """Whether the program runs."""
        return self._process is not None and not self._ended.is_set()

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Whether the program has ended, after waiting at most ``timeout_s`` seconds for it; None: as long as it
        takes."""
        return self._ended.wait(timeout_s)

    def listens(self, port: int) -> bool:
        """Whether a process of this program, and not another one, listens on ``port``."""
        return self._process is not None and any(_listens(process, port) for process in _tree(self._process.pid))

    def death(self) -> EngineError:
        """The error to raise for a program that ended on its own."""
        return self.failure(f"ended {_meaning(self._process.poll() if self._process else None)}.")

    def failure(self, what: str) -> EngineError:
        """An error that states ``what`` happened and quotes the last lines of the log."""
        last = [f"  {line}" for line in self.last_lines()]
        where = f"The last lines of {self.log_file}:" if last else f"It wrote nothing into {self.log_file}."
        return EngineError("\n".join([f"{self.name} {what}", where, *last]))

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The last ``count`` lines of its log."""
        if not self.log_file.exists():
            return []
        with self.log_file.open("rb") as stream:
            stream.seek(max(0, self.log_file.stat().st_size - TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()[-count:]

    def stop(self) -> None:
        """Terminate the program; after 3 seconds, kill it and all its descendants."""
        with self._starting:
            self._stopped = True
        if self._process is None:
            self._ended.set()
            return
        tree = _tree(self._process.pid)
        if self.is_alive():
            self._process.terminate()
        _wait_gone(tree, TERMINATE_GRACE_S)
        # Processes started meanwhile are in the group; processes that left the group are in the tree.
        for process in tree:
            _kill(process)
        _kill_group(self._process.pid)
        _wait_gone(tree, KILL_GRACE_S)
        self._ended.wait(KILL_GRACE_S)

    def _keep(self, command: Sequence[str]) -> None:
        parent = os.getpid()
        try:
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    list(command),
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=lambda: die_with(parent),
                )
        except OSError as error:
            self._failure = error
            self._ended.set()
            return
        finally:
            self._started.set()
        self._process.wait()
        self._ended.set()


def _meaning(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    return f"by signal {-code} ({signal.Signals(-code).name})" + (
        ", often the kernel's out-of-memory killer" if code == -9 else ""
    )


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        found = process.net_connections("inet")
    except psutil.Error:  # it has ended
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    # Not psutil.wait_procs: it takes the exit code before subprocess does, and waits for zombies that no process reaps.
    deadline_s = time.monotonic() + timeout_s
    while any(map(_runs, processes)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
