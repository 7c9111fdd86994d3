"""Records the processes, ports and files of a run while it runs, and reports those that are left after its end.

Everything that a run starts inherits a mark in its environment and a folder for temporary files of its own, so what is
left cannot be confused with other programs on the machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_core.config.secrets import PASS_ENV

MARK = "ENDS_FOLDER"
SHARED = "/dev/shm/"
LOOK_S = 0.3
KEPT = ("ray", "torchinductor_")
"""Prefixes of folders that libraries keep after every process, however it ends: Ray's logs, torch's compiled code."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a run has left: command lines of processes, ports, files."""

    processes: list[str]
    ports: list[int]
    shared: list[str]
    temporary: list[str]

    def __str__(self) -> str:
        found: dict[str, Sequence[object]] = {
            "processes": self.processes,
            "ports": self.ports,
            "/dev/shm": self.shared,
            "temporary": self.temporary,
        }
        return "; ".join(f"{name}: {', '.join(map(str, one))}" for name, one in found.items() if one) or "nothing"


@dataclass(slots=True)
class LeakCheck:
    """``with LeakCheck(folder) as check:`` watches every process that was started with ``check.environment``.

    Arguments:
        folder: of the mark; the run's own, so no other run has it.
    """

    folder: Path
    ports: set[int] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="e-", dir="/tmp")))
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)
    _known: dict[psutil.Process, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of the driver."""
        # Engines, routers and reward processes get only what they need, and this.
        return {**os.environ, MARK: str(self.folder), PASS_ENV: MARK, "TMPDIR": str(self.temporary)}

    def __enter__(self) -> LeakCheck:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self.processes():
            with suppress(psutil.Error):
                one.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)
        for path in self.shared:
            Path(path).unlink(missing_ok=True)

    def processes(self, holding: str = "") -> list[psutil.Process]:
        """Those that run now and whose command line holds the text."""
        return [one for one in psutil.process_iter() if self._is_ours(one) and holding in command_line(one)]

    def left(self, within_s: float) -> Left:
        """What is left once no process runs, or after ``within_s`` seconds."""
        deadline_s = time.monotonic() + within_s
        while (processes := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        listening = self.ports & listened({process.pid for process in processes})
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith(KEPT)]
        shared = [Path(path).name for path in sorted(self.shared) if Path(path).exists()]
        return Left([command_line(one)[:60] for one in processes], sorted(listening), shared, sorted(files))

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process not in self._known:
                # The title of a scheduler overwrites its environment; its parent is seen before it.
                is_child = (parent := process.parent()) is not None and self._known.get(parent, False)
                self._known[process] = is_child or process.environ().get(MARK) == str(self.folder)
            return self._known[process] and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            found = self.processes()
            self.ports |= listened({process.pid for process in found})
            for process in found:
                self.shared |= mapped(process)


def command_line(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def listened(pids: set[int]) -> set[int]:
    """The ports on which one of these processes listens."""
    found = psutil.net_connections("inet")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN and one.pid in pids}


def mapped(process: psutil.Process) -> set[str]:
    """Its files in /dev/shm that have a name."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line.split(maxsplit=5)[5] for line in lines if SHARED in line}
    return {name for name in names if name.startswith(SHARED) and not name.endswith("(deleted)")}


def writes_into(process: psutil.Process, name: str) -> bool:
    """Whether its standard output is the file of that name."""
    try:
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).name == name
    except OSError:
        return False
