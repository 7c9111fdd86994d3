"""A live run, the stages that it reaches, and the faults that are injected there: the parts of ``fault_matrix.py``."""

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

from tests.campaigns.leak_check import LeakCheck, command_line, writes_into

STAGE_LIMIT_S = 300.0
LOOK_S = 0.02
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
AGAIN_S = 0.5
"""Seconds between two Ctrl-C."""


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
    """A live run: its driver, its terminal output so far, and its leak check."""

    folder: Path
    driver: subprocess.Popen[bytes]
    leaks: LeakCheck
    screen: bytearray = field(default_factory=bytearray)
    seen: dict[str, int] = field(default_factory=dict)

    def rows(self) -> int:
        """Lines of metrics."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def log(self, name: str = "engine-0") -> str:
        """What is in a log so far."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def said(self) -> str:
        """What it has printed so far, lines that the terminal broke joined."""
        errors = self.folder.parent / "errors.log"
        printed = bytes(self.screen).decode(errors="replace") + errors.read_text(errors="replace")
        return " ".join(printed.split())

    def one(self, holding: str, log: str | None = None) -> list[psutil.Process]:
        """Its processes of that name, and of that log."""
        return [found for found in self.leaks.processes(holding) if log is None or writes_into(found, log)]

    def hold(self, stage: str) -> Path:
        """Make the run wait at the stage; returns the file that appears once it waits."""
        (self.leaks.folder / f"hold-{stage}").touch()
        return self.leaks.folder / f"at-{stage}"


# --- Stages: whether the run is there ---------------------------------------------------------------------------------


def starting_ray(run: Live) -> bool:
    """Ray's first service runs, the others do not yet."""
    return bool(run.one("gcs_server"))


def loading(run: Live) -> bool:
    """The engine loads its weights and does not answer yet."""
    return "Load weight begin" in run.log()


def loading_eval(run: Live) -> bool:
    """The same of the engine that only evaluates."""
    return "Load weight begin" in run.log("eval-engine-0")


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


def publishing_by_disk(run: Live) -> bool:
    """A version's files are being written after a checkpoint."""
    return has_checkpoint(run) and any((run.folder / "weights").glob("*/draft"))


def saving(run: Live) -> bool:
    """A checkpoint is being written, and not the first."""
    return has_checkpoint(run) and any((run.folder / "checkpoints").glob(".step-*.draft"))


def ending(run: Live) -> bool:
    """The last checkpoint is there, and the servers are being stopped."""
    return has_checkpoint(run) and not run.one("sglang_router") and bool(run.seen.setdefault("ending", 1))


def has_checkpoint(run: Live) -> bool:
    """Whether a resume has something to start from."""
    return any((run.folder / "checkpoints").glob("step-*"))


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


def kill_driver(run: Live) -> None:
    """By SIGKILL: nothing of the driver's code runs any more."""
    run.driver.kill()


def kill(holding: str, log: str | None = None) -> Callable[[Live], None]:
    """SIGKILL to the run's processes of that name, and of that log."""

    def inject(run: Live) -> None:
        victims = run.one(holding, log)
        assert victims, f"none of {[command_line(one)[:50] for one in run.leaks.processes()]} is {holding!r}"
        for one in victims:
            one.kill()

    return inject


def kill_in_update(run: Live) -> None:
    """SIGKILL to the engine's scheduler, which was stopped before so that the update cannot have ended."""
    (scheduler,) = run.one("sglang::scheduler", "engine-0.log")
    scheduler.suspend()
    time.sleep(AGAIN_S)
    scheduler.kill()


def suspend_engine(run: Live) -> None:
    """SIGSTOP to the engine's scheduler."""
    (scheduler,) = run.one("sglang::scheduler", "engine-0.log")
    scheduler.suspend()


def freeze_engine(run: Live) -> None:
    """Stop the main thread of the engine's scheduler, as in a deadlock; ptrace(2) does so without a stop signal."""
    (scheduler,) = run.one("sglang::scheduler", "engine-0.log")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        assert libc.ptrace(request, scheduler.pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
    # A killed process stays a zombie until its tracer has waited for it.
    threading.Thread(target=_reap, args=(scheduler.pid,), daemon=True).start()


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        while not (os.WIFEXITED(status := os.waitpid(pid, WALL)[1]) or os.WIFSIGNALED(status)):
            continue


def wait_for_end(run: Live) -> None:
    """Nothing: the run ends by itself."""


def kill_rewards(run: Live) -> None:
    """SIGKILL to every process of rewards; the run has to go on, and is ended two steps later."""
    kill("slime_core.rollout.reward_worker")(run)
    (run.leaks.folder / "hold-generating").unlink()
    before = run.rows()
    wait_until(lambda: run.rows() > before + 1 or run.driver.poll() is not None, STAGE_LIMIT_S, "two more steps")
    ctrl_c(run)


def then_goes_on(inject: Callable[[Live], None], server: str = "engine 0") -> Callable[[Live], None]:
    """``inject``; the server is started again, and the run is ended after two more steps."""

    def inject_and_wait(run: Live) -> None:
        inject(run)
        for stage in ("generating", "training"):
            (run.leaks.folder / f"hold-{stage}").unlink(missing_ok=True)
        wait_until(lambda: f"{server} gets requests again" in run.said() or over(run), STAGE_LIMIT_S, "the restart")
        before = run.rows()
        wait_until(lambda: run.rows() > before + 1 or over(run), STAGE_LIMIT_S, "two more steps")
        ctrl_c(run)

    return inject_and_wait


def over(run: Live) -> bool:
    """Whether the run has ended."""
    return run.driver.poll() is not None


ENGINE = kill("sglang::scheduler", "engine-0.log")
EVAL_ENGINE = kill("sglang::scheduler", "eval-engine-0.log")
SCORER = kill("sglang::scheduler", "scorer-0.log")
ROUTER = kill("sglang::router")
RANK, SAMPLER = kill("ray::LearnerActor"), kill("ray::SamplerActor")
