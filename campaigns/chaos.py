"""Injects 100 faults into 15 runs, each process of a run at each of its stages, and checks what becomes of the run.

    python -m campaigns.chaos FOLDER [--seed N] [--first N] [--runs N]        45 minutes on two idle cores

The runs are the built-in task with real engines, some with one engine and some with two, over two transports, with and
without partial rollouts. Their rewards ask a retriever, a process beside the run. When files, logs and processes show
that the run has reached a stage (``pause_at_stage.py`` pauses it where a stage is short), a fault is injected; then the
run must train two more steps, by itself or, where the fault ended the command, after ``slime run --load RUN``. After
each fault

- the groups of the newest row add up (``ledger/...``), and the run has compared its own ledger with its files,
- learner and engines compute the same (``parity/mean``),
- of a command that ended, no process is left after ten seconds; of a run that restarted itself, none but the driver.

The first two of 15 folders also hold a run whose disk, or shared memory, gets full, and that ends with a message. At
the end of a run ``slime ledger`` has to balance, and no process, port or file may be left. The table has a row for
each fault: what followed, and the seconds to the end of the second step. ``--first 4 --runs 3`` makes runs 4, 5 and 6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from campaigns.fault_injection import FAULTS, STAGE_LIMIT_S, STAGES, Live, wait_until
from campaigns.leak_check import MARK, LeakCheck, command_line
from campaigns.ledger import SLIME
from campaigns.pause_at_stage import RETRIEVER
from slime_core.config.schema import ARITHMETIC
from slime_core.config.secrets import PASS_ENV
from tests.ports import kept_port

PLUGIN = Path(__file__).parent / "pause_at_stage.py"
HELD_OUT = ARITHMETIC / "data" / "held_out.jsonl"
NUM_FAULTS, NUM_RUNS = 100, 15
END_LIMIT_S, ORPHAN_LIMIT_S = 180.0, 10.0
AWAY_S = 3.0
"""Seconds until another retriever takes the place of one that was killed or stopped."""
LARGEST_DIFFERENCE = 1e-5
PROBLEM = re.compile(r"Traceback \(most recent call last\)|Exception ignored|Fatal Python error")
STEP = re.compile(r"^step \d+/", re.MULTILINE)
RESTART = re.compile(r"slime: restart \d+ of \d+ in \S+ s: the run (.*?)[,.] ")
SERVER = re.compile(r"((?:engine|router)[ \d]*) gets requests again")

ENDS = ("Ctrl-C", "Ctrl-C twice", "SIGTERM", "SIGTERM to its group")
AT: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine", "kill"): tuple(STAGES),
    ("engine", "stop"): ("generating",),
    ("engine", "freeze"): ("generating",),
    ("engine", "slow"): ("generating", "publishing"),
    ("engine", "garbage reply"): ("generating", "evaluating"),
    ("engine", "connection cut"): ("generating", "evaluating"),
    ("router", "kill"): ("generating", "training", "evaluating"),
    ("router", "slow"): ("generating",),
    ("learner rank", "kill"): tuple(STAGES),
    ("learner rank", "slow"): ("training", "publishing", "saving"),
    ("sampler", "kill"): tuple(STAGES),
    ("sampler", "slow"): ("generating", "evaluating"),
    ("reward worker", "kill"): ("generating", "evaluating"),
    ("reward worker", "stop"): ("generating",),
    ("reward worker", "slow"): ("generating",),
    ("reward worker", "garbage reply"): ("generating",),
    ("raylet", "kill"): tuple(STAGES),
    ("raylet", "slow"): ("training",),
    ("GCS", "kill"): ("generating", "training"),
    ("driver", "kill"): tuple(STAGES),
    ("driver", "slow"): ("generating",),
    **{("driver", event): tuple(STAGES) for event in ENDS[:2]},
    **{("driver", event): ("generating", "training", "saving") for event in ENDS[2:]},
    ("retriever", "kill"): ("generating",),
    ("retriever", "stop"): ("generating",),
    ("retriever", "slow"): ("generating",),
    ("retriever", "garbage reply"): ("generating", "evaluating"),
    ("retriever", "connection cut"): ("generating", "evaluating"),
}
"""Target and fault -> the stages at which it is injected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to whom, and when."""

    target: str
    event: str
    stage: str

    @property
    def ends(self) -> bool:
        """Whether the command ends of it."""
        is_of_driver = self.target == "driver" and (self.event in ENDS or self.event == "kill")
        return is_of_driver or self == FIRST_START

    @property
    def code(self) -> int:
        """Exit code of a command that it ends."""
        if self == FIRST_START:
            return 1
        return -signal.SIGKILL if self.event == "kill" else 130


FIRST_START = Fault("engine", "kill", "starting")
"""A server that does not come up is taken for a mistake: its exit status is that of one with wrong flags."""


def plan(seed: int) -> list[list[Fault]]:
    """The faults of each run, in order: every one of :data:`AT`, and others again up to 100. A fault while the run
    starts is the first of its run."""
    dice = random.Random(seed)
    every = [Fault(target, event, stage) for (target, event), stages in AT.items() for stage in stages]
    starts = [one for one in every if one.stage == "starting"]
    others = [one for one in every if one.stage != "starting"]
    others += dice.choices(others, k=NUM_FAULTS - len(every))
    dice.shuffle(starts)
    dice.shuffle(others)
    runs: list[list[Fault]] = [[one] for one in starts] + [[] for _ in range(NUM_RUNS - len(starts))]
    for one in others:
        min(runs, key=len).append(one)
    return runs


def flags(number: int) -> list[str]:
    """Of run ``number``: its engines, its transport and its rollouts vary."""
    restarts_engines = ("--rollout-num-gpus", "2", "--rollout-health-check-first-wait", "0")
    transport = ("tensor", "distributed")[number // 2 % 2]
    return [
        *("--plugin", "grpo", "--plugin", str(PLUGIN), "--device", "cpu", "--rm-type", "held", "--seed", str(number)),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-rollout", "10000"),
        *("--eval-datasets", f"name = 'held', path = '{HELD_OUT}@[0:16]', rm_type = 'held_evaluating'"),
        *("--eval-prompt-data", "none", "--eval-interval", "2", "--skip-eval-before-train", "--save-interval", "1"),
        *("--save-keep-last", "2", "--save-hf", "false", "--sglang-log-level-http", "info", "--progress", "lines"),
        *("--update-weight-transport", transport, "--update-weight-buffer-size", "20000"),
        *("--rollout-health-check-timeout", "5", "--sglang-watchdog-timeout", "20"),
        *(restarts_engines if number % 2 else ()),
        *(("--over-sampling-batch-size", "8", "--partial-rollout") if number % 3 == 2 else ()),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What followed a fault; ``wrong`` is empty where all is as it should be."""

    what: str
    seconds: float
    wrong: tuple[str, ...]

    @property
    def cells(self) -> str:
        """Of the table."""
        return f"{self.what} | {self.seconds:.0f} | {'; '.join(self.wrong) or 'yes'}"


@dataclass(frozen=True, slots=True)
class Full:
    """A file system that gets full: its path, where ``{run}`` is the run folder, its size, and the exit
    code and the message of the run."""

    name: str
    where: str
    size: str
    code: int
    says: str


# --- One run ----------------------------------------------------------------------------------------------------------


def carry_out(number: int, faults: Sequence[Fault], folder: Path) -> Iterator[tuple[Fault, Outcome]]:
    """Inject ``faults`` one after the other; yields what followed each, and last what the whole run leaves."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with LeakCheck(folder) as leaks, serving() as (retriever, port):
        output = folder / "output.txt"
        run = Live(folder / "run", output, leaks, start(number, folder, leaks, port), retriever)
        try:
            for fault in faults:
                yield fault, follow(run, fault, number, port)
            run.driver.terminate()
            run.driver.wait(END_LIMIT_S)
            left = leaks.left(ORPHAN_LIMIT_S)
            wrong = [*balance(run.folder), *([f"left: {left}"] if str(left) != "nothing" else [])]
            wrong += ["a traceback"] if PROBLEM.search(printed(run)) else []
            yield Fault("whole run", "SIGTERM", "end"), Outcome(f"{len(faults)} faults", 0.0, tuple(wrong))
        finally:
            run.driver.kill()
            run.driver.wait()
            end(run.retriever)


def printed(run: Live) -> str:
    """What the run said of itself: without the last lines of processes that died."""
    return "\n".join(line for line in run.said().splitlines() if not line.startswith("  "))


def start(
    number: int, folder: Path, leaks: LeakCheck, port: int, *more: str, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """``slime run`` in the background, in a process group of its own.

    Arguments:
        within: words before the command.
    """
    url = f"http://127.0.0.1:{port}/retrieve"
    environment = {**leaks.environment, PASS_ENV: f"{MARK} {RETRIEVER}", RETRIEVER: url}
    words = [*SLIME, "run", *flags(number), "--output-dir", str(folder / "run"), "--max-restarts", "9", *more]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*within, *words],
            env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            # A shell starts background jobs with SIGINT ignored, and the run would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip


def serve(port: int) -> subprocess.Popen[bytes]:
    """The retriever, which is not a part of the run."""
    words = [*SLIME, "searchr1", "serve", "--port", str(port)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The retriever, and its port."""
    with kept_port() as port:
        retriever = serve(port)
        try:
            yield retriever, port
        finally:
            end(retriever)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def follow(run: Live, fault: Fault, number: int, port: int) -> Outcome:
    """Bring the run to the stage, inject the fault, and wait for two more steps; a fault that comes to nothing hides no
    other."""
    try:
        wait_until(lambda: STAGES[fault.stage](run) or over(run), STAGE_LIMIT_S, fault.stage)
        if over(run):
            raise SystemExit(f"the run ended before: {run.said()[-1500:]}")
        before, offset, started_s = run.leaks.processes(), len(run.said()), time.monotonic()
        FAULTS[fault.event](run, fault.target)
        run.let_go()
        wrong = list(after_end(run, fault, before, number, port)) if fault.ends else []
        if fault.target == "retriever" and fault.event in ("kill", "stop"):
            time.sleep(AWAY_S)
            end(run.retriever)
            run.retriever = serve(port)
        wait_until(lambda: len(STEP.findall(run.said()[offset:])) > 1 or over(run), STAGE_LIMIT_S, "two more steps")
        if over(run):
            raise SystemExit(f"the run ended: {run.said()[-1500:]}")
        seconds = time.monotonic() - started_s
        said = run.said()[offset:]
        wrong += [*of_rows(run.folder), *of_processes(run, fault, before, said)]
        return Outcome(what_followed(fault, said), seconds, tuple(wrong))
    except (AssertionError, SystemExit, psutil.Error) as nothing:
        run.let_go()
        if over(run):
            run.driver = start(number, run.folder.parent, run.leaks, port, *resume(run))
        return Outcome("", 0.0, (f"came to nothing: {str(nothing)[:300]!r}",))


def over(run: Live) -> bool:
    """Whether the command has ended."""
    return run.driver.poll() is not None


def after_end(run: Live, fault: Fault, before: list[psutil.Process], number: int, port: int) -> Iterator[str]:
    """Wait for the end of the command, look what is left, and start it again; yields what is wrong."""
    code = run.driver.wait(END_LIMIT_S)
    if code != fault.code:
        yield f"exit code {code}, not {fault.code}"
    _, alive = psutil.wait_procs(before, timeout=ORPHAN_LIMIT_S)
    if left := [command_line(one)[:60] for one in alive if command_line(one)]:
        yield f"left after {ORPHAN_LIMIT_S:g} s: {', '.join(left)}"
    run.driver = start(number, run.folder.parent, run.leaks, port, *resume(run))


def resume(run: Live) -> tuple[str, ...]:
    """How the next command goes on."""
    return ("--load", str(run.folder)) if any((run.folder / "checkpoints").glob("step-*")) else ()


def of_rows(folder: Path) -> Iterator[str]:
    """What is wrong with the two newest rows."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [row for row in rows if "train/loss" in row]
    if [row["step"] for row in steps] != list(range(len(steps))):
        yield f"steps {[row['step'] for row in steps]} have rows"
    row = steps[-1]
    places = ("trained", "filtered", "failed", "evicted", "held", "in_flight", "returned")
    if row["ledger/taken"] != sum(row[f"ledger/{place}"] for place in places):
        yield f"the ledger of row {row['step']} does not balance"
    found = [one["parity/mean"] for one in steps[-2:] if "parity/mean" in one]
    if not found or max(found) >= LARGEST_DIFFERENCE:
        yield f"parity of rows {row['step'] - 1} and {row['step']}: {found}"


def of_processes(run: Live, fault: Fault, before: list[psutil.Process], said: str) -> Iterator[str]:
    """What is left of a run that restarted itself, other than its driver."""
    if RESTART.search(said) and not fault.ends:
        alive = [one for one in before if one.is_running() and one.pid != run.driver.pid and command_line(one)]
        if alive:
            yield f"left of the start before: {', '.join(command_line(one)[:60] for one in alive)}"


def what_followed(fault: Fault, said: str) -> str:
    """In words."""
    if fault.ends:
        return "the command ends; the next one goes on"
    if found := RESTART.findall(said):
        return f"the run {found[-1]}" + (f" ({len(found)} restarts)" if len(found) > 1 else "")
    if found := SERVER.findall(said):
        return f"{' and '.join(dict.fromkeys(found))} started again"
    return "goes on"


def balance(run: Path) -> list[str]:
    """The error of ``slime ledger``, if it reports one."""
    result = subprocess.run([*SLIME, "ledger", str(run)], capture_output=True, text=True, check=False)
    return [f"ledger: {result.stderr.strip()[:200]}"] if result.returncode else []


FULL = (
    Full("disk", "{run}", "1200k", 1, r"its disk is full|cannot be written"),
    Full("/dev/shm", "/dev/shm", "16k", 2, r"shared memory: the processes need .* of /dev/shm"),
)


def fill(number: int, full: Full, folder: Path) -> Iterator[tuple[Fault, Outcome]]:
    """A run whose disk, or shared memory, gets full: it ends with a message, and leaves nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    where = full.where.format(run=folder / "run")
    mount = f'mkdir -p {where} && mount -t tmpfs -o size={full.size} tmpfs {where} && exec "$@"'
    within = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    with LeakCheck(folder) as leaks, serving() as (_, port):
        started_s = time.monotonic()
        driver = start(number, folder, leaks, port, within=within)
        try:
            code = driver.wait(STAGE_LIMIT_S)
        finally:
            end(driver)
        seconds, said = time.monotonic() - started_s, (folder / "output.txt").read_text(errors="replace")
        wrong = [] if code == full.code and re.search(full.says, said) else [f"exit code {code}: {said[-300:]!r}"]
        left = leaks.left(ORPHAN_LIMIT_S)
        wrong += [f"left: {left}"] if str(left) != "nothing" else []
    yield Fault(full.name, "it is full", "any"), Outcome("ends with a message", seconds, tuple(wrong))


def main(folder: Path, *, seed: int, first: int, runs: int) -> int:
    """Print the table, and add it to ``folder/table.md``; 0 where every row is as it should be."""
    folder.mkdir(parents=True, exist_ok=True)
    is_right = True
    with (folder / "table.md").open("a") as table:
        rows = ["| run | target | fault | stage | what followed | seconds | right |", "|---|---|---|---|---|---|---|"]
        for number, faults in list(enumerate(plan(seed), start=1))[first - 1 : first - 1 + runs]:
            place = folder / f"run-{number}"
            carried_out = [carry_out(number, faults, place)]
            carried_out += [fill(number, one, place / "full") for one in FULL[number - 1 : number]]
            for fault, outcome in chain.from_iterable(carried_out):
                is_right = is_right and not outcome.wrong
                rows.append(f"| {number} | {fault.target} | {fault.event} | {fault.stage} | {outcome.cells} |")
                print(*rows, sep="\n", flush=True)
                print(*rows, sep="\n", flush=True, file=table)
                rows.clear()
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="how many runs")
    given = parser.parse_args()
    os.chdir(Path(__file__).parents[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the live run is ended, too
    sys.exit(main(given.folder.resolve(), seed=given.seed, first=given.first, runs=given.runs))
