"""A live run, the stages that it reaches, and the faults that are injected there: the parts of ``chaos.py``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from campaigns.leak_check import LeakCheck, command_line, writes_into

STAGE_LIMIT_S = 300.0
LOOK_S = 0.02
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
AGAIN_S = 0.5
"""Seconds between two Ctrl-C."""

SLOW_S, SLICE_S = 5.0, 0.05
DAMAGED = 3
"""Answers that one fault damages."""


def wait_until(is_there: Callable[[], object], limit_s: float, what: str) -> None:
    """Return once ``is_there()`` is true.

    Raises:
        SystemExit: it did not become true within ``limit_s``.
    """
    deadline_s = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {limit_s:g} s for {what}")
        time.sleep(LOOK_S)


@dataclass(slots=True)
class Live:
    """A run folder, the command that trains in it now, and its leak check.

    Arguments:
        output: everything that its commands have printed.
        retriever: the service that rewards ask.
    """

    folder: Path
    output: Path
    leaks: LeakCheck
    driver: subprocess.Popen[bytes]
    retriever: subprocess.Popen[bytes]
    seen: dict[str, int] = field(default_factory=dict)

    def log(self, name: str = "engine-0") -> str:
        """What is in a log so far."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def said(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")

    def one(self, holding: str, log: str | None = None) -> list[psutil.Process]:
        """Its processes of that name, and of that log."""
        return [found for found in self.leaks.processes(holding) if log is None or writes_into(found, log)]

    def hold(self, stage: str) -> Path:
        """Make the run wait at the stage; returns the file that appears once it waits."""
        (self.leaks.folder / f"hold-{stage}").touch()
        return self.leaks.folder / f"at-{stage}"

    def let_go(self) -> None:
        """The run waits at no stage; the next one is recognised anew."""
        for path in [*self.leaks.folder.glob("hold-*"), *self.leaks.folder.glob("at-*")]:
            path.unlink(missing_ok=True)
        self.seen.clear()


# --- Stages: whether the run is there ---------------------------------------------------------------------------------


def starting(run: Live) -> bool:
    """An engine of the command that runs now loads its weights and does not answer yet."""
    before = run.seen.setdefault("starting", 0)
    return "Load weight begin" in run.log()[before:] and bool(run.one("sglang::scheduler", "engine-0.log"))


def held(stage: str) -> Callable[[Live], bool]:
    """There is a checkpoint, and the run waits at the stage."""

    def there(run: Live) -> bool:
        return has_checkpoint(run) and run.hold(stage).exists()

    return there


def publishing(run: Live) -> bool:
    """A weight update after a checkpoint is in progress."""
    if not has_checkpoint(run):
        return False
    lines = run.log().splitlines()
    seen = run.seen.setdefault("lines", len(lines))
    new = "\n".join(lines[seen:])
    return new.rfind("POST /begin_weight_update") > new.rfind("POST /end_weight_update")


def saving(run: Live) -> bool:
    """A checkpoint is being written, and not the first."""
    return has_checkpoint(run) and any((run.folder / "checkpoints").glob(".step-*.draft"))


def has_checkpoint(run: Live) -> bool:
    """Whether a resume has something to start from."""
    return any((run.folder / "checkpoints").glob("step-*"))


STAGES = {
    "starting": starting,
    "generating": held("generating"),
    "training": held("training"),
    "publishing": publishing,
    "saving": saving,
    "evaluating": held("evaluating"),
}


# --- Faults -----------------------------------------------------------------------------------------------------------


def ctrl_c(run: Live) -> None:
    """What a terminal does: the signal goes to every process of the foreground group."""
    with suppress(ProcessLookupError):
        os.killpg(run.driver.pid, signal.SIGINT)


def ctrl_c_twice(run: Live) -> None:
    """A second Ctrl-C soon after the first."""
    ctrl_c(run)
    time.sleep(AGAIN_S)
    ctrl_c(run)


def terminate(run: Live) -> None:
    """What a batch system does."""
    run.driver.terminate()


def terminate_all(run: Live) -> None:
    """What ``timeout``, systemd and some batch systems do: to every process of the run's group."""
    os.killpg(run.driver.pid, signal.SIGTERM)


def chosen(run: Live, target: str) -> list[psutil.Process]:
    """The processes of ``target``."""
    if target == "driver":
        return [psutil.Process(run.driver.pid)]
    if target == "retriever":
        return [psutil.Process(run.retriever.pid)]
    holding, log = TARGETS[target]
    victims = run.one(holding, log)
    assert victims, f"none of {[command_line(one)[:50] for one in run.leaks.processes()]} is {holding!r}"
    return victims


TARGETS: dict[str, tuple[str, str | None]] = {
    "engine": ("sglang::scheduler", "engine-0.log"),
    "router": ("sglang::router", None),
    "learner rank": ("ray::LearnerActor", None),
    "sampler": ("ray::SamplerActor", None),
    "reward worker": ("slime_core.rollout.reward_worker", None),
    "raylet": ("raylet/raylet", None),
    "GCS": ("gcs/gcs_server", None),
}
"""Target -> a part of its command line, and the log that it writes; its children share both with it."""


def kill(run: Live, target: str) -> None:
    """SIGKILL."""
    for one in chosen(run, target):
        one.kill()


def stop(run: Live, target: str) -> None:
    """SIGSTOP, for good."""
    for one in chosen(run, target):
        one.suspend()


def freeze(run: Live, target: str) -> None:
    """Stop the main thread, as in a deadlock; ptrace(2) does so without a stop signal."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    for one in chosen(run, target):
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            assert libc.ptrace(request, one.pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
        # A killed process stays a zombie until its tracer has waited for it.
        threading.Thread(target=_reap, args=(one.pid,), daemon=True).start()


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        while not (os.WIFEXITED(status := os.waitpid(pid, WALL)[1]) or os.WIFSIGNALED(status)):
            continue


def slow(run: Live, target: str) -> None:
    """A fifth of its speed, for five seconds."""
    victims = chosen(run, target)
    run.let_go()
    deadline_s = time.monotonic() + SLOW_S
    while time.monotonic() < deadline_s:
        with suppress(psutil.NoSuchProcess):
            for one in victims:
                one.suspend()
            time.sleep(4 * SLICE_S)
            for one in victims:
                one.resume()
            time.sleep(SLICE_S)


def damage(what: str) -> Callable[[Live, str], None]:
    """The next answers of the target are noise (``garbage``), or their connections end first (``cut``)."""

    def inject(run: Live, target: str) -> None:
        for number in range(DAMAGED):
            (run.leaks.folder / f"{what}-{target.split()[0]}-{number}").touch()

    return inject


FAULTS: dict[str, Callable[[Live, str], None]] = {
    "kill": kill,
    "stop": stop,
    "freeze": freeze,
    "slow": slow,
    "garbage reply": damage("garbage"),
    "connection cut": damage("cut"),
    "Ctrl-C": lambda run, _: ctrl_c(run),
    "Ctrl-C twice": lambda run, _: ctrl_c_twice(run),
    "SIGTERM": lambda run, _: terminate(run),
    "SIGTERM to its group": lambda run, _: terminate_all(run),
}
