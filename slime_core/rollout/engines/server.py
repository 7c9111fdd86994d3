"""A program that listens on a port, as a child process: the base of engines and routers.

    Server      the child process, its port, its log and its health, from start to stop
    is_hung     tells whether an engine runs and does not answer
    FirstAnswer tells whether an engine has answered a request since it started

A separate thread starts the program and waits for its end. The thread must live as long as the program: Linux sends
the parent-death signal when the *thread* that started a child ends, not its process (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import http.client
import math
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

from slime_core.config.secrets import send_key_to
from slime_core.errors import EngineError, WeightSyncError
from slime_core.rollout.engines.responses import LOADS, Load, read_load
from slime_core.runtime.machine import family, runs, status
from slime_core.runtime.supervisor import die_with
from slime_core.weights.engine_control import call, request

TERMINATE_GRACE_S = 3.0
"""The supervisor of an engine takes a tenth of that on an idle machine."""

KILL_GRACE_S = 3.0
LAST_LINES = 20
POLL_S = 0.05
TAIL_BYTES = 64 * 1024

LONGEST_ANSWER_S = 5.0
"""Limit of one probe, in seconds."""

HANG_LIMIT_S = 300.0
"""Seconds without an answer of the scheduler after which an engine hangs: SGLang's default of --watchdog-timeout, after
which it ends a server by itself whose forward pass does not end (sglang 0.5.23, srt/utils/watchdog.py). It does not
notice a hang anywhere else."""

PROBE_INTERVAL_S = 15.0
"""Seconds between two requests to the scheduler of an engine."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The probes of an engine, which hangs if its scheduler has not answered ``probes`` requests in a row.

    Arguments:
        interval_s: between two requests.
        timeout_s: to answer one.
        probes: unanswered requests in a row.
        first_wait_s: from the first look to the first request.
        first_answer_s: without an answer of the scheduler, as long as the engine has not answered its first generation
            request, for which it may compile kernels; at least ``probes * timeout_s``.
    """

    interval_s: float = PROBE_INTERVAL_S
    timeout_s: float = HANG_LIMIT_S
    probes: int = 1
    first_wait_s: float = 0.0
    first_answer_s: float = 0.0

    def allowed(self, *, has_answered: bool) -> int:
        """Unanswered requests in a row at which the engine hangs.

        Arguments:
            has_answered: it has answered a generation request.
        """
        return self.probes if has_answered else max(self.probes, math.ceil(self.first_answer_s / self.timeout_s))


SCHEDULER, READY = "/server_info", "/ready"
"""Paths of SGLang's: the first asks every scheduler, also of a paused engine, and generates nothing; the second answers
503 while the engine is paused, without asking a scheduler."""

ADDRESS_IN_USE = "address already in use"
"""The operating system's message, in lower case."""

SEARCHED_LINES = 200
"""Log lines to search: SGLang prints that message some 60 lines before its end."""


class Server(ABC):
    """One program, from :meth:`start` to :meth:`stop`, in a separate process group; it dies with this process.

    ``url`` is its address after :meth:`wait_ready` has returned. ``stop`` may be called at any time, from any thread;
    it also ends a program that a concurrent ``start`` launches, and a later ``start`` fails.

    Arguments:
        name: for messages, ``"engine 0"``.
        host: address to listen on.
        env: its whole environment.
        log_file: receives its output; its folder is created.
        start_timeout_s: seconds until it must answer.
    """

    probe: str
    """The path that answers 200 once the server accepts requests."""

    health: HealthCheck | None = None
    """The probes that detect a scheduler that hangs. None: it has none."""

    def __init__(self, name: str, *, host: str, env: Mapping[str, str], log_file: Path, start_timeout_s: float) -> None:
        self.name = name
        self.log_file = log_file
        self.env = dict(env)
        self.url = ""
        self._host = host
        self._start_timeout_s = start_timeout_s
        self._port = 0
        self._starting = threading.Lock()
        self._stopped = False
        self._started = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._silent_s = 0.0

    @abstractmethod
    def command(self, port: int, second: int) -> list[str]:
        """Return program and arguments of a server that listens on ``port``; ``second`` is another free port."""

    def start(self, port: int = 0) -> None:
        """Start the program; may be repeated after it has ended by itself. :meth:`wait_ready` waits until it answers.

        Arguments:
            port: to listen on; 0: a free one.

        Raises:
            EngineError: it cannot be executed, or was stopped before.
        """
        self._port, second = free_ports(2, host=self._host)
        self._port = port or self._port
        self.url = f"http://{self._host}:{self._port}"
        send_key_to(self.url)
        command = self.command(self._port, second)
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

    def _keep(self, command: Sequence[str]) -> None:
        parent = os.getpid()
        try:
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env=self.env,
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

    def wait_ready(self) -> None:
        """Wait until it accepts requests. Restarts it on another port if another program took its port meanwhile.

        Raises:
            EngineError: it died, or did not answer in time; the message ends with the last lines of its log.
        """
        try:
            self._wait_answer()
        except EngineError:
            if not self._lost_its_port():
                raise
            self.start()
            self._wait_answer()

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Wait at most ``timeout_s`` seconds for its end, without a limit if None; return whether it has ended."""
        return self._ended.wait(timeout_s)

    def is_alive(self) -> bool:
        """Return whether the program runs."""
        return self._process is not None and not self._ended.is_set()

    def check_alive(self) -> None:
        """Check that the program runs.

        Raises:
            EngineError: it ended; the message ends with the last lines of its log.
        """
        if not self.is_alive():
            raise self._failed(f"ended {_meaning(self._process.poll() if self._process else None)}.")

    def suspended(self) -> list[int]:
        """Ids of its processes that a signal (SIGSTOP, SIGTSTP) has stopped, so that it answers nothing."""
        return [one.pid for one in self._tree() if status(one) == psutil.STATUS_STOPPED]

    def suspension(self, seconds: float) -> EngineError:
        """The error to raise for a program that has been suspended for ``seconds``."""
        ids = " ".join(map(str, self.suspended()))
        return self._failed(
            f"at {self.url} was stopped by a signal (SIGSTOP) and has answered nothing for {seconds:g} s; kill -CONT "
            f"{ids} would have let it continue.\nFind out what stops it, then resume the run with --load RUN_FOLDER."
        )

    def wait_hang(self) -> bool:
        """Wait until it hangs or ends; return whether it hangs. Return False at once for a server without probes."""
        if self.health is None or self.wait_end(self.health.first_wait_s):
            return False
        unanswered, first = 0, FirstAnswer(self.url)
        while not self.wait_end(0 if unanswered else self.health.interval_s):
            has_answered = not self.health.first_answer_s or first.look()
            unanswered = unanswered + 1 if is_hung(self.url, limit_s=self.health.timeout_s) else 0
            if unanswered >= self.health.allowed(has_answered=has_answered):
                self._silent_s = unanswered * self.health.timeout_s
                return self.is_alive()
        return False

    def hang(self) -> EngineError:
        """Return the error to raise for a server that hangs."""
        ids, health = " ".join(map(str, self.running())), self.health or HealthCheck()
        flag = "--sglang-watchdog-timeout" if health.probes == 1 else "--rollout-health-check-timeout"
        return self._failed(
            f"at {self.url} runs, but its scheduler has answered nothing for {self._silent_s:g} s, "
            f"so it hangs. `py-spy dump --pid N` shows where, for N in {ids}. If one forward pass takes that long, "
            f"raise {flag}.\nResume the run with --load RUN_FOLDER."
        )

    def running(self) -> list[int]:
        """Return the ids of its processes that have not ended."""
        return [process.pid for process in self._tree() if runs(process)]

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """Return the last ``count`` lines of its log."""
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
        tree = self._tree()
        if self.is_alive():
            self._process.terminate()
        _wait_gone(tree, TERMINATE_GRACE_S)
        # Processes started meanwhile are in the group; processes that left the group are in the tree.
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _wait_gone(tree, KILL_GRACE_S)
        self._ended.wait(KILL_GRACE_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _wait_answer(self) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if self.wait_end(POLL_S):
                self.check_alive()
            if time.monotonic() > deadline_s:
                raise self._failed(f"did not answer at {self.url}{self.probe} within {self._start_timeout_s:g} s.")

    def _answers(self) -> bool:
        # Another program may have taken the port and answer too: the engine of another run.
        answers = _answers_with(http.client.OK, self.url, self.probe)
        return answers and any(_listens(process, self._port) for process in self._tree())

    def _lost_its_port(self) -> bool:
        """Return whether the program ended because another program listens on its port."""
        lines = self.last_lines(SEARCHED_LINES) if self.wait_end(0) else []
        return any(ADDRESS_IN_USE in line.lower() for line in lines)

    def _failed(self, what: str) -> EngineError:
        """Return an error that states ``what`` happened and quotes the last lines of the log."""
        last = [f"  {line}" for line in self.last_lines()]
        where = f"The last lines of {self.log_file}:" if last else f"It wrote nothing into {self.log_file}."
        return EngineError("\n".join([f"{self.name} {what}", where, *last]))

    def _tree(self) -> list[psutil.Process]:
        """Return the program and its descendants; empty if it does not run."""
        return [] if self._process is None else family(self._process.pid)


def _meaning(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    killer = ", often the kernel's out-of-memory killer" if code == -signal.SIGKILL else ""
    return f"by signal {-code} ({signal.Signals(-code).name}){killer}"


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("inet")
    except psutil.Error:  # it has ended
        return False
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr.port == port for entry in connections)


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    # Not psutil.wait_procs: it takes the exit code before subprocess does, and waits for zombies that no process reaps.
    deadline_s = time.monotonic() + timeout_s
    while any(map(runs, processes)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """Return ``count`` different ports of ``host`` that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind((host, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def is_hung(url: str, *, limit_s: float) -> bool:
    """Return whether the scheduler of the engine at ``url`` leaves a request without an answer for ``limit_s`` seconds.

    A busy engine answers between two forward passes. A paused engine does not hang: the calls that pause it have
    limits, and loading weights takes as long as the disk needs.
    """
    try:
        request(url, SCHEDULER, timeout_s=limit_s)
    except TimeoutError:
        return not _answers_with(http.client.SERVICE_UNAVAILABLE, url, READY)
    except (OSError, http.client.HTTPException):  # it ends, or an external one restarts
        return False
    return False


class FirstAnswer:
    """Notices when an engine has answered a request since it was first looked at; its warm-up does not count.

    An engine does not report its answers: it has given one if it has computed and works on fewer sequences than before.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._first: Load | None = None
        self._most_sequences = 0
        self._has_answered = False

    def look(self) -> bool:
        """Return whether the engine has answered; asks its HTTP process, which answers while its scheduler is busy."""
        load = None if self._has_answered else _load(self._url)
        if load is not None:
            self._first = self._first or load
            has_computed = load.counters != self._first.counters
            self._has_answered = has_computed and (not load.sequences or load.sequences < self._most_sequences)
            self._most_sequences = max(self._most_sequences, load.sequences)
        return self._has_answered


def _load(url: str) -> Load | None:
    try:
        return read_load(call(url, LOADS, timeout_s=LONGEST_ANSWER_S))
    except WeightSyncError:  # it ends, or is no engine
        return None


def _answers_with(status: int, url: str, path: str) -> bool:
    try:
        return request(url, path, timeout_s=LONGEST_ANSWER_S)[0] == status
    except (OSError, http.client.HTTPException):
        return False
