"""Times the demo from the command to the end of its first step: seconds of each phase, CPU seconds of each process.

    python -m bench.start outputs/start [--rounds 3] [-- --hf-checkpoint ... further flags of `slime run`]   two minutes

Starts ``slime run`` as ``make demo`` does, several times. Phases follow one another; their ends come from the run
folder (``config.toml`` is written after preflight), from the start time of Ray's first process, and from
``timeline/driver.jsonl``. Engine, learner and sampler start at the same time; the second table says when each of their
parts had ended, counted from the command, by the start times of processes and by log lines. The third has CPU seconds,
the kernel's counts, of every process that was alive at the end of the first step: on two cores, half of their sum is
the least that the start can take.
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
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from bench.step import when

FLAGS = ("--plugin", "grpo", "--plugin", "plots", "--device", "cpu", "--progress", "none", "--num-rollout", "2")
PREFLIGHT, RAY, STARTED = "imports, plugins, settings, preflight", "imports of what starts processes", "Ray"
SPANS = {
    ("start", None): "engine, learner, sampler",
    ("update_weights", None): "first weight update",
    ("eval", None): "evaluation of the start weights, 500 prompts",
    ("rollout", 0): "first rollout",
    ("train", 0): "first training",
    ("update_weights", 0): "weight update",
}
"""A span of the driver's timeline, by name and step -> its name in the table."""

WHOLE = "until the end of the first step"
PROCESSES: Mapping[str, Callable[[Sequence[str]], bool]] = {
    "engine: its process starts": lambda words: any("engines/keyed.py" in word for word in words),
    "engine: imports done": lambda words: words[0].startswith("sglang::scheduler"),
    "learner: its process starts": lambda words: words[0].startswith("ray::LearnerActor"),
    "sampler: its process starts": lambda words: words[0].startswith("ray::SamplerActor"),
}
"""Name of a moment -> the process that starts then."""

LINES = {
    "engine: serves": ("engine-0.log", "The server is fired up", "[%Y-%m-%d %H:%M:%S]"),
    "learner: Megatron is imported": ("rank-0.log", "INFO megatron", "%Y-%m-%d %H:%M:%S"),
    "learner: model is built": ("rank-0.log", "Setting up DistributedDataParallel", "%Y-%m-%d %H:%M:%S"),
}
"""Name of a moment -> the first line of a log that shows it, and the form of its time, whole seconds."""

Found = dict[str, float]


def main() -> None:
    """Start several runs, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="further flags of slime run, after --")
    given = parser.parse_args()
    rounds = [start(given.folder, given.flags) for _ in range(given.rounds)]
    print(f"{given.rounds} rounds; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores at the end")
    for title, place in (("phase | s", 0), ("moment | s after the command", 1), ("process | CPU s", 2)):
        print_table(title, [found[place] for found in rounds])


def start(folder: Path, flags: Sequence[str]) -> tuple[Found, Found, Found]:
    """Start one run; return seconds of phases, moments after the command, and CPU seconds by process."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "slime_core", "run", *FLAGS, *flags, "--output-dir", str(folder)]
    started = time.time()
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    used = when(run, folder, 1)
    tree = [(one, one.cmdline()) for one in psutil.Process(run.pid).children(recursive=True)]
    ray = min(one.create_time() for one, words in tree if words and "gcs_server" in words[0])
    moments = {
        name: min((one.create_time() for one, words in tree if words and fits(words)), default=started) - started
        for name, fits in PROCESSES.items()
    }
    run.wait()
    moments |= {name: moment(folder / "logs" / file, *line) - started for name, (file, *line) in LINES.items()}
    phases = phases_of(folder, started, ray)
    return phases, dict(sorted(moments.items())), {**used, "all": sum(used.values())}


def phases_of(folder: Path, started: float, ray: float) -> Found:
    """Return the seconds of each phase, in order; the time between two spans of the driver is a phase, too."""
    settings = (folder / "config.toml").stat().st_mtime
    rows = [json.loads(line) for line in (folder / "timeline" / "driver.jsonl").read_text().splitlines()]
    spans = {(row["name"], row["step"]): row for row in reversed(rows)}  # of equal ones the first
    found = {PREFLIGHT: settings - started, RAY: ray - settings, STARTED: spans["start", None]["start"] - ray}
    found |= {label: spans[key]["seconds"] for key, label in SPANS.items() if key in spans}
    last = spans["update_weights", 0]
    whole = last["start"] + last["seconds"] - started
    return {**found, "between these": whole - sum(found.values()), WHOLE: whole}


def moment(log: Path, text: str, form: str) -> float:
    """Return the time of the first line of ``log`` with ``text``."""
    line = next(line for line in log.read_text(errors="replace").splitlines() if text in line)
    return datetime.strptime(line[: len(datetime.now().strftime(form))], form).timestamp()


def print_table(title: str, rounds: Sequence[Mapping[str, float]]) -> None:
    """Print the medians that are at least a tenth of a second."""
    print(f"\n| {title} | least | most |\n|---|---|---|---|")
    for name in rounds[0]:
        values = [found.get(name, 0.0) for found in rounds]
        if (median := statistics.median(values)) >= 0.1:
            print(f"| {name} | {median:.1f} | {min(values):.1f} | {max(values):.1f} |")


if __name__ == "__main__":
    main()
