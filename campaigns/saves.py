"""Kills a run while it saves and resumes it, again and again, and compares everything with a run that was left alone.

    python -m campaigns.saves FOLDER [--kills 50] [--seed N] [FLAG ...]

Further flags are slime run's. Both runs train recorded rollouts, two optimizer steps each, and save after every one. A
kill (SIGKILL) comes at a random moment from the beginning of a save on; it takes turns with the driver, the learner's
first rank, and all processes of the run at once. After each kill every folder that has the name of a checkpoint must
equal that of the run that was left alone: weights, means of the optimizer, step counts, bit for bit. At the end so must
all of them, and the rows of metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from campaigns.ledger import END_LIMIT_S, LEFT_OVERS_S, SLIME, START_LIMIT_S
from tests.processes import children
from tests.recorded_runs import FLAGS, TIMES, rows, tensors, write_rollouts

VICTIMS = ("driver", "learner rank", "all processes")
LOOK_S = 0.001
MIN_ROLLOUTS = 14


def main(folder: Path, *, kills: int, seed: int, flags: list[str]) -> None:
    """Kill and resume ``kills`` times, then let the run end; raises where anything differs."""
    # A kill comes after one or two saves have begun, and some steps later where a save takes long.
    dice, rollouts = random.Random(seed), max(2 * kills + 2, MIN_ROLLOUTS)
    folder.mkdir(parents=True, exist_ok=True)
    saved = write_rollouts(folder / "rollouts", rollouts)
    words = [*FLAGS, *flags, "--load-debug-rollout-data", str(saved), "--num-rollout", str(rollouts)]
    whole, killed = folder / "whole", folder / "killed"
    run_to_its_end([*words, "--output-dir", str(whole)], folder)
    longest_s = duration_of_a_save(whole)
    print(
        "| kill | of | ms after the save began | checkpoints before | after | drafts left |\n|---|---|---|---|---|---|"
    )
    compared: set[str] = set()
    for kill in range(kills):
        victim, delay_s = VICTIMS[kill % len(VICTIMS)], dice.uniform(0, longest_s)
        before = names(killed)
        driver = run(resumed(words, killed), folder)
        wait_for_a_save(driver, killed, saves=dice.choice((1, 2)) + len(before))
        time.sleep(delay_s)
        end(driver, victim)
        left = len(drafts(killed))
        for name in set(names(killed)) - compared:
            compare(whole / "checkpoints" / name, killed / "checkpoints" / name)
            compared.add(name)
        print(
            f"| {kill + 1} | {victim} | {1000 * delay_s:.0f} | {len(before)} | {len(names(killed))} | {left} |",
            flush=True,
        )
    resume = ["--load", str(killed)] if names(killed) else []
    assert run([*words, "--output-dir", str(killed), *resume], folder).wait() == 0, (folder / "run.log").read_text()[
        -2000:
    ]
    assert names(whole) == names(killed) == [f"step-{step + 1:06d}" for step in range(rollouts)]
    num_tensors = sum(compare(whole / "checkpoints" / name, killed / "checkpoints" / name) for name in names(whole))
    by_step = {row["step"]: row for row in rows(whole)}
    assert all(row == by_step[row["step"]] for row in rows(killed)), "rows of metrics differ"
    missing = len(by_step) - len(rows(killed))  # a driver that is killed before it writes the row of a saved step
    assert missing <= kills
    print(
        f"{kills} kills; all {rollouts} checkpoints are equal, {num_tensors} tensors bit for bit, and so are "
        f"{len(rows(killed))} rows of {len(by_step[0])} metrics; {missing} rows are missing"
    )


def run(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a run whose output is appended to ``folder/run.log``."""
    with (folder / "run.log").open("a") as log:
        return subprocess.Popen([*SLIME, "run", *words], stdout=log, stderr=log)


def run_to_its_end(words: list[str], folder: Path) -> None:
    """Carry out a run; raises where it fails."""
    if run(words, folder).wait():
        raise SystemExit(f"a run failed by itself: {(folder / 'run.log').read_text()[-2000:]}")


def resumed(words: list[str], folder: Path) -> list[str]:
    """The words that continue the run in ``folder``; without a checkpoint it starts again."""
    if names(folder):
        return [*words, "--output-dir", str(folder), "--load", str(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    return [*words, "--output-dir", str(folder)]


def duration_of_a_save(folder: Path) -> float:
    """Median seconds from the copy of a checkpoint's first file to its last change."""
    spans = []
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        changed = [path.stat().st_mtime for path in checkpoint.rglob("*") if path.is_file()]
        spans.append(max(changed) - min(changed))
    return sorted(spans)[len(spans) // 2] * 1.5


def names(folder: Path) -> list[str]:
    """Of the checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoints/step-*"))


def drafts(folder: Path) -> list[float]:
    """When each of its drafts was last changed, in seconds since 1970."""
    found = []
    for draft in folder.glob("checkpoints/.step-*.draft"):
        with suppress(FileNotFoundError):  # it has its name by now
            found.append(draft.stat().st_ctime)
    return found


def wait_for_a_save(driver: subprocess.Popen[bytes], folder: Path, *, saves: int) -> None:
    """Return when the save begins that makes the checkpoints ``saves``; drafts of an earlier run do not count."""
    deadline, started_s = time.monotonic() + START_LIMIT_S, psutil.Process(driver.pid).create_time()
    while time.monotonic() < deadline and driver.poll() is None:
        if len(names(folder)) >= saves - 1 and any(changed_s > started_s for changed_s in drafts(folder)):
            return
        time.sleep(LOOK_S)
    raise SystemExit(f"the run ended by itself, with exit code {driver.poll()}, before it saved")


def end(driver: subprocess.Popen[bytes], victim: str) -> None:
    """Kill what is named, and return when every process of the run has ended."""
    family = psutil.Process(driver.pid).children(recursive=True)
    for one in _ranks(family) if victim == "learner rank" else [psutil.Process(driver.pid)]:
        one.kill()
    for one in family if victim == "all processes" else []:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    driver.wait(timeout=END_LIMIT_S)
    _, left = psutil.wait_procs(family, timeout=LEFT_OVERS_S)
    for one in left:
        one.kill()
    psutil.wait_procs(left)


def _ranks(family: list[psutil.Process]) -> list[psutil.Process]:
    """The learner's ranks."""
    found = children("ray::LearnerActor", of=family)
    assert found, "the run has no ranks"
    return found


def compare(first: Path, second: Path) -> int:
    """How many tensors two checkpoints have; raises where one differs."""
    assert state(first) == state(second), f"{second}: state.json"
    model = "hf/model.safetensors"
    assert sorted_tensors(first / model) == sorted_tensors(second / model), f"{second}: {model}"
    found = [tensors(one / "torch_dist") for one in (first, second)]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value == found[1][name], f"{second}: {name}"
    assert any("exp_avg_sq" in name for name in found[0])
    return len(found[0])


def state(checkpoint: Path) -> dict[str, Any]:
    """Its ``state.json``, without times."""
    found: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return {**found, "row": {name: value for name, value in found["row"].items() if not name.startswith(TIMES)}}


def sorted_tensors(file: Path) -> dict[str, bytes]:
    """Name -> bytes of each weight."""
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(file).items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kill a run while it saves, resume it, compare with one left alone")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    known, others = parser.parse_known_args()
    main(known.folder.resolve(), kills=known.kills, seed=known.seed, flags=others)
