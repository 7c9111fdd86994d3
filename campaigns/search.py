"""Runs the example ``examples/search_r1`` with its controls, and prints what was learned.

    python -m campaigns.search FOLDER        finished runs are only read

The controls take one thing away each: rewards that mean something, and passages, from the training and from the
trained model. FOLDER/curves.svg shows held-out exact match, FOLDER/curves.json holds the numbers; the command ends with
an error if the run did not learn, a control did, or the trained model does without passages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from campaigns.curves import plot

EMPTY = "{folder}/empty.jsonl"
RUNS: Mapping[str, tuple[str, ...]] = {
    "search": (),
    "random rewards": ("--rm-type", "random"),
    "empty retriever": ("--searchr1.corpus", EMPTY),
}
"""Label -> flags in addition to ``slime run --plugin searchr1``."""

SCORE = "eval/held_out"
METRICS = {
    "exact match": SCORE,
    "of one fact": f"{SCORE}/hops=1",
    "of two facts": f"{SCORE}/hops=2",
    "searches a question": f"{SCORE}/search_r1/searches",
}
"""What the table calls a metric -> its key."""

HIGHEST_START, RISE, DRIFT, FLOOR = 0.4, 0.25, 0.10, 0.10
"""Of held-out exact match: most before, least rise, most rise of random rewards, most without passages."""

LIMIT_S = 15 * 60
"""Of one run, on two cores."""

Points = dict[int, dict[str, float]]
"""Rollouts trained -> metric -> value."""


def main(folder: Path) -> None:
    """Run what is missing, then print and write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "empty.jsonl").write_text(json.dumps({"contents": "nothing"}) + "\n")
    curves = {name: run(folder, name) for name in RUNS}
    plot(folder / "curves.svg", {name: {at: row[SCORE] for at, row in one.items()} for name, one in curves.items()})
    took_s = {name: float((at(folder, name) / "seconds").read_text()) for name in RUNS}
    without = without_passages(folder, "search")
    found = {"took_s": took_s, "curves": curves, "trained model without passages": without}
    (folder / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
    print_table(curves, took_s)
    print("trained model without passages: " + ", ".join(f"{what} {without[key]:.3f}" for what, key in METRICS.items()))
    sys.exit("\n".join(missed(curves, took_s, without[SCORE])) or 0)


def at(folder: Path, name: str) -> Path:
    """Folder of a run."""
    return folder / name.replace(" ", "-")


def without_passages(folder: Path, name: str) -> dict[str, float]:
    """The scores of a trained model whose searches find nothing (``slime eval``)."""
    output = at(folder, f"{name} without passages")
    if not (output / "scores.json").exists():
        words = ["eval", str(at(folder, name)), "--output-dir", str(output), *RUNS["empty retriever"]]
        given = [one.format(folder=folder) for one in words]
        subprocess.run([sys.executable, "-m", "slime_core", *given], check=True)
    scores = json.loads((output / "scores.json").read_text())["metrics"]
    return {key: scores[key] for key in METRICS.values()}


def run(folder: Path, name: str) -> Points:
    """The evaluations of one run, which is trained unless it has been."""
    output = at(folder, name)
    if not (output / "seconds").exists():
        flags = [one.format(folder=folder) for one in RUNS[name]]
        started_s = time.monotonic()
        where = ["--output-dir", str(output), "--progress", "lines"]
        words = ["run", "--plugin", "searchr1", "--device", "cpu", *where, *flags]
        subprocess.run([sys.executable, "-m", "slime_core", *words], check=True)
        (output / "seconds").write_text(f"{time.monotonic() - started_s:.0f}\n")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {key: row[key] for key in METRICS.values()} for row in rows if SCORE in row}


def print_table(curves: Mapping[str, Points], took_s: Mapping[str, float]) -> None:
    """Every metric over rollouts."""
    steps = sorted({step for points in curves.values() for step in points})
    print("| rollouts trained | " + " | ".join(map(str, steps)) + " |\n|" + "---|" * (len(steps) + 1))
    for name, points in curves.items():
        for what, metric in METRICS.items():
            cells = (f"{points[step][metric]:.3f}" if step in points else "" for step in steps)
            print(f"| {name}: {what} | " + " | ".join(cells) + " |")
    for name, seconds in took_s.items():
        print(f"{name}: {seconds:.0f} s")


def missed(curves: Mapping[str, Points], took_s: Mapping[str, float], without: float) -> list[str]:
    """What does not hold of what the example promises.

    Arguments:
        without: exact match of the trained model without passages.
    """
    ends = {name: (points[min(points)][SCORE], points[max(points)][SCORE]) for name, points in curves.items()}
    found = []
    start, end = ends["search"]
    if start > HIGHEST_START or end < start + RISE:
        found.append(f"exact match went from {start:.3f} to {end:.3f}; wanted at most {HIGHEST_START} and {RISE} more")
    if took_s["search"] > LIMIT_S:
        found.append(f"the run took {took_s['search']:.0f} s, more than {LIMIT_S}")
    if without > FLOOR:
        found.append(f"the trained model reaches {without:.3f} without passages, more than {FLOOR}")
    start, end = ends["random rewards"]
    if end > start + DRIFT:
        found.append(f"random rewards went from {start:.3f} to {end:.3f}, more than {DRIFT} up")
    end = ends["empty retriever"][1]
    if end > FLOOR:
        found.append(f"an empty retriever ended at {end:.3f}, more than {FLOOR}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
