"""Kills a run again and again while it generates, resumes it, and counts where every prompt group ended.

    python -m campaigns.ledger FOLDER [--kills N] [--rollouts N] [--seed N] [--longest N] [FLAG ...]

Further flags are slime run's. With ``--longest N`` responses have up to N tokens, each prompt its own number, so that
many are aborted halfway and resume with newer weights; rewards are then random, because no such response is right.
Without it, responses have up to four tokens, and hardly any is aborted.

The run is the built-in task with over-sampling, partial rollouts, a transform that drops groups and a checkpoint every
two rollouts. Kills take turns: the driver by SIGKILL, the inference server, the driver by SIGTERM; each comes at a
random moment after the first checkpoint. After each, ``slime ledger`` has to balance. At the end the files of samples
are read once more by other code: no group may be trained twice, none that was handed out may be missing, and of a
response that several versions sampled, each token must belong to one version.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.long_responses import long_responses

SLIME = [sys.executable, "-m", "slime_core"]
FLAGS = (
    *("--plugin", "grpo", "--progress", "lines", "--save-interval", "2", "--save-hf", "false", "--max-restarts", "0"),
    *("--eval-prompt-data", "none", "--eval-interval", "none"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--over-sampling-batch-size", "16"),
    *("--partial-rollout", "--sample-transforms", "drop_zero_std"),
)
KILLS = ("driver, SIGKILL", "engine, SIGKILL", "driver, SIGTERM")
ENGINE = "sglang::scheduler"
START_LIMIT_S = 900.0
END_LIMIT_S = 300.0
LEFT_OVERS_S = 20.0
"""Seconds within which the processes of a killed driver must end by themselves."""


def main(folder: Path, *, kills: int, rollouts: int, seed: int, longest: int | None, flags: list[str]) -> None:
    """Kill and resume ``kills`` times, then let the run end; raises if a group is unaccounted for."""
    dice = random.Random(seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lengths = [] if longest is None else long_responses(folder.with_suffix(".jsonl"), longest, dice)
    words = [*FLAGS, *lengths, *flags, "--num-rollout", str(rollouts), "--output-dir", str(folder)]
    print("| try | ended by | rows | checkpoint | groups taken | open | ledger |\n|---|---|---|---|---|---|---|")
    for attempt in range(kills + 1):
        kill = KILLS[attempt % len(KILLS)] if attempt < kills else None
        resume = ["--load", str(folder)] if attempt and list(folder.glob("checkpoints/step-*")) else []
        target = None if kill is None else min(rollouts - 1, 2 + attempt * (rollouts - 2) // (kills + 1))
        code = carry_out([*words, *resume], folder, kill, target=target, delay_s=dice.uniform(0, 2))
        print(f"| {attempt + 1} | {kill or f'itself, exit code {code}'} | {standing(folder)} |", flush=True)
    print(ledger(folder))
    verify(folder, rollouts)


def carry_out(words: list[str], folder: Path, kill: str | None, *, target: int | None, delay_s: float) -> int:
    """One try; returns its exit code. Ends the campaign where the run has failed by itself.

    Arguments:
        target: rows after which it is killed, ``delay_s`` later.
    """
    path = folder.parent / f"{folder.name}.log"
    with path.open("a") as log:
        driver = subprocess.Popen([*SLIME, "run", *words], stdout=log, stderr=log)
    deadline_s = time.monotonic() + START_LIMIT_S
    while (
        driver.poll() is None and time.monotonic() < deadline_s and not (target is not None and rows(folder) >= target)
    ):
        time.sleep(0.05)
    family = psutil.Process(driver.pid).children(recursive=True) if driver.poll() is None else []
    if kill is not None and driver.poll() is None:
        time.sleep(delay_s)
        inject(kill, driver, family)
    elif driver.poll():
        raise SystemExit(
            f"The run failed by itself, before it was killed. {path} ends with:\n{path.read_text()[-2000:]}"
        )
    code = driver.wait(timeout=END_LIMIT_S)
    _, left = psutil.wait_procs(family, timeout=LEFT_OVERS_S)
    for process in left:
        process.kill()
    return code


def inject(kill: str, driver: subprocess.Popen[bytes], family: list[psutil.Process]) -> None:
    """Send the signal that ``kill`` names to the process that it names."""
    if kill.startswith("engine"):
        (engine,) = [one for one in family if one.is_running() and ENGINE in " ".join(one.cmdline())]
        engine.kill()
    else:
        driver.send_signal(signal.SIGTERM if kill.endswith("SIGTERM") else signal.SIGKILL)


def rows(folder: Path) -> int:
    """Rows of metrics so far; 0 before there are any, or before a checkpoint is."""
    path = folder / "metrics.jsonl"
    has_checkpoint = any(folder.glob("checkpoints/step-*"))
    return path.read_bytes().count(b"\n") if path.is_file() and has_checkpoint else 0


def standing(folder: Path) -> str:
    """How far the run is, as cells of the table."""
    report = ledger(folder)
    checkpoints = sorted(path.name for path in folder.glob("checkpoints/step-*"))
    last = report.rpartition("end of the files")[2].splitlines()
    counts = {line.split()[0]: line.split()[-1] for line in last[1:] if line.strip()}
    balances = "balances" in report or not checkpoints
    if not balances:
        raise SystemExit(report)
    newest = checkpoints[-1] if checkpoints else "none"
    return (
        f"{rows(folder)} | {newest} | {counts['taken']} | {counts['open']} | {'balances' if checkpoints else 'started'}"
    )


def ledger(folder: Path) -> str:
    """What ``slime ledger`` says; ends the campaign where it finds a fault."""
    ended = subprocess.run([*SLIME, "ledger", str(folder)], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return ended.stdout


def verify(folder: Path, rollouts: int) -> None:
    """Count from the files of samples alone, by other means than the ledger's."""
    found: list[dict[str, Any]] = []
    for rollout in range(rollouts):
        lines = (folder / "samples" / f"train-{rollout:06d}.jsonl").read_text().splitlines()
        found += [{**json.loads(line), "rollout": rollout} for line in lines]
    trained = {(row["group"], row["rollout"]) for row in found if row["status"] in ("completed", "truncated")}
    twice = [group for group, count in Counter(group for group, _ in trained).items() if count > 1]
    (newest,) = sorted(folder.glob("checkpoints/step-*"))[-1:]
    cursor = json.loads((newest / "state.json").read_text())["cursor"]
    source = cursor["source"].get("source", cursor["source"])
    kept = {group for name in ("in_flight", "held") for group, _ in cursor["ledger"][name]}
    lost = set(range(source["next"])) - {row["group"] for row in found} - kept - set(source["returned"])
    print(f"{source['next']} groups handed out, {len(trained)} ended in a file, {len(kept)} held, "
          f"{len(source['returned'])} returned; twice: {twice}; lost: {sorted(lost)}")  # fmt: skip
    report_resumed([row for row in found if row["status"] in ("completed", "truncated") and "dropped" not in row])
    times = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spent = [row["perf/ledger_time"] for row in times if "perf/ledger_time" in row]
    steps = [row["perf/step_time"] for row in times if "perf/step_time" in row]
    print(f"counting took {1000 * sum(spent) / len(spent):.1f} ms a step of {sum(steps) / len(steps):.2f} s")
    if twice or lost:
        raise SystemExit("a group was trained twice or lost")


def report_resumed(found: list[dict[str, Any]]) -> None:
    """Report how many trained samples several versions sampled; ends the campaign where a token has no version."""
    resumed = [row for row in found if len(row["weight_versions"]) > 1]
    for row in resumed:
        spans = row["weight_spans"]
        edges = [0, *(end for _, _, end in spans)]
        whole = [start for _, start, _ in spans] == edges[:-1] and edges[-1] == row["response_length"]
        versions = [int(version) for version, _, _ in spans]
        if not whole or versions != sorted(versions) or versions[-1] > row["rollout"]:
            raise SystemExit(f"rollout {row['rollout']}, sample {row['index']}: its tokens have the versions {spans}")
    ages = [row["rollout"] - min(map(int, row["weight_versions"])) for row in found]
    print(f"{len(resumed)} of {len(found)} trained responses were aborted and resumed with newer weights, at most "
          f"{max((len(row['weight_versions']) for row in found), default=0)} versions in one; the oldest token was "
          f"{max(ages, default=0)} rollouts old")  # fmt: skip
    for row in resumed[:1]:
        print(f"rollout {row['rollout']}, sample {row['index']}: {row['weight_spans']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kill and resume a run, and count where its prompt groups ended")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, help="tokens of the longest response, at most 110")
    known, others = parser.parse_known_args()
    main(known.folder, kills=known.kills, rollouts=known.rollouts, seed=known.seed, longest=known.longest, flags=others)
