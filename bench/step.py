"""Times the steps of a run: seconds of the phases, and CPU seconds of each process.

    python -m bench.step outputs/step                                       the built-in demo
    python -m bench.step --steps 3 outputs/step -- --hf-checkpoint ... further flags of `slime run`

Starts `slime run`, leaves the first steps out, and prints medians of the phases in ``metrics.jsonl``. CPU seconds are
the kernel's counts (/proc/PID/stat) of the run's process tree, Ray included; unlike wall seconds they hardly depend on
what else the machine does. ``sglang::scheduler`` computes the model and samples, ``sglang server`` is HTTP and the
tokenizer manager.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]

PHASES = ("perf/rollout_time", "perf/train_time", "perf/update_weights_time", "perf/step_time")
LEFT_OUT = 3
"""Number of steps before measuring: the first ones allocate, compile and open connections."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="seconds of a step by phase and process")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("flags", nargs="*", help="further flags of slime run, after --")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    last = LEFT_OUT + arguments.steps
    flags = ["--plugin", "grpo", "--device", "cpu", "--eval-interval", "1000", "--skip-eval-before-train"]
    flags += ["--num-rollout", str(last + 1), "--output-dir", str(folder), "--progress", "none", *arguments.flags]
    run = subprocess.Popen([sys.executable, "-m", "slime_core", "run", *flags], stdout=subprocess.DEVNULL)
    before = when(run, folder, LEFT_OUT)
    after = when(run, folder, last)
    run.wait()
    rows = steps(folder)[LEFT_OUT:last]
    print(f"{len(rows)} steps; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")
    print("\n| phase | median s | least | most |\n|---|---|---|---|")
    for phase in PHASES:
        found = [row[phase] for row in rows]
        print(f"| {phase} | {statistics.median(found):.3f} | {min(found):.3f} | {max(found):.3f} |")
    print("\n| process | CPU ms a step |\n|---|---|")
    used = {name: 1e3 * (after[name] - before[name]) / len(rows) for name in after}
    for name, milliseconds in sorted(used.items(), key=lambda one: -one[1]):
        if milliseconds >= 1:
            print(f"| {name} | {milliseconds:.0f} |")
    print(f"| all | {sum(used.values()):.0f} |")


def steps(folder: Path) -> list[dict[str, float]]:
    """Return the rows of finished training steps."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(row) for row in file.read_text().splitlines() if row.endswith("}")] if file.exists() else []
    return [row for row in rows if PHASES[-1] in row]


def when(run: subprocess.Popen[bytes], folder: Path, count: int) -> Counter[str]:
    """Wait until ``run`` has done ``count`` steps; return its CPU seconds by process."""
    while len(steps(folder)) < count:
        if run.poll() is not None:
            raise SystemExit(f"the run ended after {len(steps(folder))} steps, with {run.returncode}")
        time.sleep(0.05)
    found: Counter[str] = Counter()
    root = psutil.Process(run.pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[name_of(process, root)] += times.user + times.system
        except psutil.Error:  # it has ended
            continue
    return found


def name_of(process: psutil.Process, root: psutil.Process) -> str:
    """Return the name of a process in the table."""
    command = " ".join(process.cmdline())
    if process == root:
        return "driver"
    if "--model-path" in command:
        return "sglang server"
    actor = command.split(".")[0].split(" ")[0]
    return actor if actor.startswith(("ray::", "sglang::")) and "IDLE" not in actor else "rest of Ray"


if __name__ == "__main__":
    main()
