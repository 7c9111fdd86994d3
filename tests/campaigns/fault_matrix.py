"""Injects faults at every stage of a run (signals, the death of each process) and reports what is left: the table of
docs/troubleshooting.md.

    python -m tests.campaigns.fault_matrix FOLDER [--only TEXT] [--without-resume]    25 minutes on two idle cores

Each row is a run of the built-in task with real engines. When its files, logs and processes show that it has reached a
stage (``pause_at_stage.py`` pauses it where a stage is short), a fault is injected. The row reports the exit code, the
last lines of standard error, the processes, ports and files that are left, and whether the run can be resumed and its
ledger balances. The exit code of the campaign says whether every row is as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.schema import ARITHMETIC
from slime_core.config.secrets import PASS_ENV
from tests.campaigns.fault_injection import (
    ENGINE,
    EVAL_ENGINE,
    RANK,
    ROUTER,
    SAMPLER,
    SCORER,
    STAGE_LIMIT_S,
    Live,
    ctrl_c,
    ctrl_c_twice,
    ending,
    freeze_engine,
    held,
    kill_driver,
    kill_in_update,
    kill_rewards,
    loading,
    loading_eval,
    publishing,
    publishing_by_disk,
    saving,
    starting_ray,
    suspend_engine,
    terminate,
    terminate_all,
    then_goes_on,
    wait_for_end,
    wait_until,
)
from tests.campaigns.leak_check import MARK, LeakCheck, Left
from tests.campaigns.ledger import SLIME

PLUGIN = Path(__file__).parent / "pause_at_stage.py"
END_LIMIT_S, LEFT_S = 180.0, 60.0

PROBLEM = re.compile(r"Traceback \(most recent call last\)|Exception ignored|Fatal Python error")
ESCAPE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
CURSOR = re.compile(r"\x1b\[\?25([lh])")

RUN = (
    *("--plugin", "grpo", "--plugin", str(PLUGIN), "--device", "cpu", "--rm-type", "held", "--seed", "3"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-rollout", "10000", "--save-interval", "2"),
    *("--sglang-log-level-http", "info"),
)
NO_EVAL = ("--eval-prompt-data", "none", "--eval-interval", "none")
HELD_OUT = ARITHMETIC / "data" / "held_out.jsonl"
EVAL = (
    *("--eval-datasets", f"name = 'held', path = '{HELD_OUT}@[0:16]', rm_type = 'held_evaluating'"),
    *("--eval-prompt-data", "none", "--eval-interval", "2", "--skip-eval-before-train"),
)
MANY_BUCKETS = ("--update-weight-buffer-size", "20000")
"""Bytes; nearly one weight each, so that an update takes a while."""


# --- Rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One fault: its stage, the event, further flags of the run, and the expected exit code and message; ``full`` is a
    folder and the size of the file system that the run has there, with ``{run}`` for the run's own folder."""

    stage: str
    event: str
    there: Callable[[Live], bool]
    inject: Callable[[Live], None]
    flags: tuple[str, ...] = NO_EVAL
    code: int = 130
    says: str = "slime: interrupted"
    full: str = ""

    @property
    def name(self) -> str:
        """Of its folder."""
        return re.sub(r"\W+", "-", f"{self.stage} {self.event}".lower())

    def words(self) -> list[str]:
        """Its flags, and those of all rows that it does not give itself."""
        pairs = zip(RUN[::2], RUN[1::2], strict=True)
        return [*self.flags, *(word for flag, value in pairs if flag not in self.flags for word in (flag, value))]


SHORT = (*NO_EVAL, "--num-rollout", "2")
STAGES = (
    ("starting Ray", starting_ray, NO_EVAL),
    ("loading engines", loading, NO_EVAL),
    ("generating", held("generating"), NO_EVAL),
    ("training", held("training"), NO_EVAL),
    ("publishing", publishing, (*NO_EVAL, *MANY_BUCKETS)),
    ("evaluating", held("evaluating"), EVAL),
    ("saving a checkpoint", saving, (*NO_EVAL, "--save-interval", "1")),
    ("ending", ending, SHORT),
)
DIED = r"ended (by signal 9|with exit code 1)"
"""A server whose scheduler was killed is killed by it, or, while it loads, ends by itself."""
FULL = (
    ("disk of the run", "{run} 1200k", r"its disk is full|cannot be written"),
    ("/dev/shm", "/dev/shm 300k", r"/dev/shm, through which processes hand over data, has 0 MB free"),
)
"""What is full, its mount and size, and what the run says. The file system is the run's own (unshare(1))."""

UPDATES = (
    ("tensor", publishing, MANY_BUCKETS),
    ("distributed", publishing, MANY_BUCKETS),
    ("disk", publishing_by_disk, ()),
)


def matrix(folder: Path) -> Iterator[Row]:
    """All rows; ``folder`` gets the files that some of them need."""
    for stage, there, flags in STAGES:
        yield Row(stage, "Ctrl-C", there, ctrl_c, flags)
        yield Row(stage, "Ctrl-C twice", there, ctrl_c_twice, flags)
    yield Row("training", "SIGTERM", held("training"), terminate)
    yield Row("training", "SIGTERM to its group", held("training"), terminate_all)
    yield Row("loading engines", "engine dies", loading, ENGINE, code=1, says=f"engine 0 {DIED}")
    yield Row("generating", "engine dies", held("generating"), ENGINE, code=1, says=f"engine 0 {DIED}")
    for transport, there, more in UPDATES:
        stage, words = f"publishing, {transport}", (*NO_EVAL, *more, "--update-weight-transport", transport)
        yield Row(stage, "engine dies", there, kill_in_update, words, code=1, says=f"engine 0 {DIED}")
    interleaved, own = (*EVAL, "--eval-interleaved"), (*EVAL, "--eval-num-gpus", "1")
    yield Row("evaluating", "engine dies", held("evaluating"), ENGINE, EVAL, 1, f"engine 0 {DIED}")
    yield Row("evaluating, interleaved", "engine dies", held("evaluating"), ENGINE, interleaved, 1, f"engine 0 {DIED}")
    yield Row("evaluating, own engine", "that engine dies", held("evaluating"), EVAL_ENGINE, own, 1, DIED)
    yield Row("loading engines", "eval engine dies", loading_eval, EVAL_ENGINE, own, 1, DIED)
    judged = scorer_flags(folder)
    yield Row("generating", "reward model's engine dies", held("generating"), SCORER, judged, 1, DIED)
    yield Row("generating", "reward workers die", held("generating"), kill_rewards)
    yield Row("generating", "rollout actor dies", held("generating"), SAMPLER, code=1, says="sampler: sample.. died")
    yield Row("training", "learner rank dies", held("training"), RANK, code=1, says="learner rank 0: train.. died")
    yield Row("publishing", "learner rank dies", publishing, RANK, (*NO_EVAL, *MANY_BUCKETS), 1, "learner rank 0")
    stopped = r"engine 0 at \S+ was stopped by a signal \(SIGSTOP\)"
    yield Row("generating", "engine is suspended", held("generating"), suspend_engine, code=1, says=stopped)
    hung = r"engine 0 at \S+ runs, but its scheduler has answered nothing for 20 s, so it hangs"
    impatient = (*NO_EVAL, "--sglang-watchdog-timeout", "20")
    yield Row("generating", "engine hangs", held("generating"), freeze_engine, impatient, 1, hung)
    yield from restarted()
    for stage, full, says in FULL:
        yield Row(stage, "it is full", starting_ray, wait_for_end, (*NO_EVAL, "--save-interval", "1"), 1, says, full)
    for stage, there, flags in STAGES[1:7]:
        yield Row(stage, "driver is killed", there, kill_driver, flags, code=-9, says="")


def restarted() -> Iterator[Row]:
    """Faults after which servers are started again: the run goes on, and is interrupted two steps later."""
    generating, two = held("generating"), (*NO_EVAL, "--rollout-num-gpus", "2")
    alone = (*NO_EVAL, "--use-fault-tolerance")
    probed = (*two, "--rollout-health-check-first-wait", "0", "--rollout-health-check-timeout", "5")
    yield Row("generating, restarts", "engine dies", generating, then_goes_on(ENGINE), two)
    yield Row("generating, restarts", "only engine dies", generating, then_goes_on(ENGINE), alone)
    yield Row("generating, restarts", "engine is suspended", generating, then_goes_on(suspend_engine), two)
    yield Row("generating, restarts", "engine hangs", generating, then_goes_on(freeze_engine), probed)
    yield Row("generating, restarts", "router dies", generating, then_goes_on(ROUTER, "router"), two)
    yield Row("training, restarts", "engine dies", held("training"), then_goes_on(ENGINE), two)
    for transport, there, more in UPDATES:
        words = (*two, *more, "--update-weight-transport", transport)
        yield Row(f"publishing, {transport}, restarts", "engine dies", there, then_goes_on(kill_in_update), words)


def scorer_flags(folder: Path) -> tuple[str, ...]:
    """Flags of a run that takes half of its reward from an auxiliary model."""
    model, file = folder / "scorer", folder / "scorer.toml"
    if not model.exists():
        from tests.campaigns.engines import reward_model

        reward_model(model)
    file.write_text(
        f'[[engine.engine_models]]\nname = "scorer"\nmodel_path = "{model}"\nnum_gpus = 1\nis_embedding = true\n'
        '[rollout]\nrm_model = "scorer"\n'
    )
    return (*NO_EVAL, "--config", str(file), "--rm-type", "0.5*held + 0.5*served_rm")


# --- One row ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """How a run ended: what is wrong with it is in ``wrong``."""

    code: int | None
    seconds: float
    words: str
    left: Left
    resumed: str
    wrong: tuple[str, ...]

    def cells(self) -> str:
        """Of the table."""
        code = "none" if self.code is None else str(self.code)
        wrong = "; ".join(self.wrong) or "yes"
        return f"{code} | {self.seconds:.1f} | {self.words} | {self.left} | {self.resumed} | {wrong}"


def carry_out(row: Row, folder: Path, *, resumes: bool) -> Found:
    """Bring a run to the stage, inject the fault, and collect the outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with LeakCheck(folder) as leaks, started(row, folder, leaks) as run:
        wait_until(lambda: row.there(run) or run.driver.poll() is not None, STAGE_LIMIT_S, row.stage)
        if run.driver.poll() is not None:
            raise SystemExit(f"{row.name} ended before: {(folder / 'errors.log').read_text()[-3000:]}")
        row.inject(run)
        started_s = time.monotonic()
        code = ended(run.driver)
        seconds = time.monotonic() - started_s
        left = leaks.left(LEFT_S)
        screen = bytes(run.screen).decode(errors="replace")
    errors = (folder / "errors.log").read_text(errors="replace")
    whole, resumed = standing(folder / "run", resumes=resumes)
    wrong = (*whole, *faults(row, code, errors, left), *([] if code == -signal.SIGKILL else of_screen(screen)))
    return Found(code, seconds, last_words(errors), left, resumed, wrong)


@contextmanager
def started(row: Row, folder: Path, leaks: LeakCheck) -> Iterator[Live]:
    """The run on a terminal of its own; all of it is killed in the end."""
    ours, theirs = os.openpty()
    words = [*SLIME, "run", *row.words(), "--output-dir", str(folder / "run")]
    if row.full:
        where, size = row.full.format(run=folder / "run").split()
        mount = f'mkdir -p {where} && mount -t tmpfs -o size={size} tmpfs {where} && exec "$@"'
        words = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *words]
    with (folder / "errors.log").open("wb") as errors:
        driver = subprocess.Popen(
            words, env=leaks.environment, stdout=theirs, stderr=errors, stdin=subprocess.DEVNULL,
            start_new_session=True,
            # A shell starts background jobs with SIGINT ignored, and the run would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    os.close(theirs)
    run = Live(folder / "run", driver, leaks)
    threading.Thread(target=read_screen, args=(ours, run.screen), daemon=True).start()
    try:
        yield run
    finally:
        driver.kill()
        driver.wait()


def read_screen(terminal: int, screen: bytearray) -> None:
    """Collect the terminal's output until every process has closed it."""
    with suppress(OSError):
        while found := os.read(terminal, 65536):
            screen += found


def ended(driver: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it hangs."""
    with suppress(subprocess.TimeoutExpired):
        return driver.wait(END_LIMIT_S)
    return None


def faults(row: Row, code: int | None, errors: str, left: Left) -> Iterator[str]:
    """What is not as it should be."""
    if code != row.code:
        yield f"exit code {code}, not {row.code}"
    if not re.search(row.says, errors):
        yield f"does not say {row.says!r}"
    if PROBLEM.search(errors.split("The last lines of")[0]):
        yield "a traceback"
    if str(left) != "nothing":
        yield "something is left"


def of_screen(screen: str) -> Iterator[str]:
    """What is wrong with the terminal afterwards."""
    if (CURSOR.findall(screen) or ["h"])[-1] != "h":
        yield "the cursor is hidden"
    if screen and not ESCAPE.sub("", screen).endswith("\n"):
        yield "the last line has no end"


def last_words(errors: str) -> str:
    """The first line of the last message of ``slime``."""
    found = [line for line in errors.splitlines() if line.startswith("slime: ")]
    return found[-1].removeprefix("slime: ")[:90].replace("|", "\\|") if found else ""


def standing(run: Path, *, resumes: bool) -> tuple[list[str], str]:
    """What is wrong with the run's files, and the outcome of a resume."""
    wrong = []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True) if (run / "metrics.jsonl").exists() else []
    for number, line in enumerate(lines, start=1):
        with suppress(ValueError):
            if line.endswith("\n") and json.loads(line):
                continue
        wrong.append(f"metrics.jsonl:{number} is not whole")
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    wrong += [f"{one.name} lacks {part}" for one in checkpoints for part in PARTS if not (one / part).is_file()]
    if not checkpoints:
        return wrong, "no checkpoint"
    wrong += balance(run)
    if not resumes:
        return wrong, f"from {checkpoints[-1].name}"
    step = int(checkpoints[-1].name.removeprefix("step-")) + 2
    words = ["--load", str(run), "--num-rollout", str(step), "--progress", "none", *NO_EVAL]
    environment = {**os.environ, MARK: "/none", PASS_ENV: MARK}
    again = subprocess.run([*SLIME, "run", *words], capture_output=True, text=True, check=False, env=environment)
    wrong += [f"the resume ended with {again.returncode}: {last_words(again.stderr)}"] if again.returncode else []
    return wrong + balance(run), f"{checkpoints[-1].name} to {step}"


PARTS = ("state.json", "torch_dist/.metadata", "hf/model.safetensors")
"""Of a whole checkpoint."""


def balance(run: Path) -> list[str]:
    """The error of ``slime ledger``, if it reports one."""
    result = subprocess.run([*SLIME, "ledger", str(run)], capture_output=True, text=True, check=False)
    return [f"ledger: {result.stderr.strip()[:200]}"] if result.returncode else []


def looked_at(row: Row, folder: Path, *, resumes: bool) -> tuple[str, bool]:
    """Cells of the table, and whether all is as it should be; a row that came to nothing hides no other."""
    try:
        found = carry_out(row, folder, resumes=resumes)
    except (AssertionError, SystemExit) as nothing:
        return f"| | | | | came to nothing: {str(nothing)[:300]!r}", False
    return found.cells(), not found.wrong


def main(folder: Path, *, only: str, resumes: bool) -> int:
    """Print the table; 0 where every row is as it should be."""
    folder.mkdir(parents=True, exist_ok=True)
    print("| stage | what happens | code | seconds | last words | left | resumed | right |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    is_right = True
    for row in matrix(folder):
        if re.search(only, row.name):
            cells, row_is_right = looked_at(row, folder / row.name, resumes=resumes)
            is_right = is_right and row_is_right
            print(f"| {row.stage} | {row.event} | {cells} |", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="rows whose name matches, as in `training-ctrl-c`")
    parser.add_argument("--without-resume", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.folder.resolve(), only=given.only, resumes=not given.without_resume))
