"""Trains the model of ``examples/search_r1`` with its controls, and prints what it learned.

    python -m tests.campaigns.search FOLDER        finished runs are only read

FOLDER is ``outputs/search``, where ``examples/search_r1/run.toml`` looks for the start. The controls take one thing
away each: rewards that mean something, and passages. FOLDER/curves.svg shows held-out exact match, FOLDER/curve.json
holds the numbers; the command ends with an error if the run did not learn or a control did.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.campaigns.curves import draw

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_r1"
RUNS: Mapping[str, tuple[str, ...]] = {
    "search": (),
    "random rewards": ("--rm-type", "random"),
    "empty retriever": ("--searchr1.corpus", "{folder}/empty.jsonl"),
}
"""Label -> flags in addition to those of the example."""

SCORE, SEARCHES = "eval/held_out", "eval/held_out/search_r1/searches"
HIGHEST_START, RISE, DRIFT = 0.4, 0.25, 0.10
"""Of held-out exact match: most before, least rise, and most rise of random rewards."""

Points = dict[int, dict[str, float]]
"""Rollouts trained -> metric -> value."""


def main(folder: Path) -> None:
    """Run what is missing, then print and write everything."""
    if not (folder / "start" / "model" / "model.safetensors").exists():
        call("examples/search_r1/warm_up.py", str(folder / "start"))
    (folder / "empty.jsonl").write_text(json.dumps({"contents": "nothing"}) + "\n")
    curves = {name: run(folder, name) for name in RUNS}
    draw(folder / "curves.svg", {name: {at: row[SCORE] for at, row in one.items()} for name, one in curves.items()})
    (folder / "curve.json").write_text(json.dumps(curves, indent=1) + "\n")
    print_table(curves)
    sys.exit("\n".join(missed(curves)) or 0)


def run(folder: Path, name: str) -> Points:
    """The evaluations of one run, which is trained unless it has been."""
    output = folder / name.replace(" ", "-")
    if not (output / "checkpoints").exists():
        flags = [one.format(folder=folder) for one in RUNS[name]]
        start = ["--hf-checkpoint", str(folder / "start" / "model")]
        where = ["--output-dir", str(output), "--save-interval", "100", "--progress", "lines"]
        call("-m", "slime_core", "run", "--config", str(EXAMPLE / "run.toml"), *start, *where, *flags)
    rows: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {key: row[key] for key in (SCORE, SEARCHES)} for row in rows if SCORE in row}


def call(*words: str) -> None:
    """Run Python with ``words``; it has to succeed."""
    subprocess.run([sys.executable, *words], check=True)


def print_table(curves: Mapping[str, Points]) -> None:
    """Held-out exact match and searches a question, over rollouts."""
    steps = sorted({step for points in curves.values() for step in points})
    print("| rollouts trained | " + " | ".join(map(str, steps)) + " |\n|" + "---|" * (len(steps) + 1))
    for name, points in curves.items():
        for metric, what in ((SCORE, "exact match"), (SEARCHES, "searches a question")):
            cells = (f"{points[step][metric]:.3f}" if step in points else "" for step in steps)
            print(f"| {name}, {what} | " + " | ".join(cells) + " |")


def missed(curves: Mapping[str, Points]) -> list[str]:
    """What does not hold of what the example promises."""
    ends = {name: (points[min(points)][SCORE], points[max(points)][SCORE]) for name, points in curves.items()}
    found = []
    start, end = ends["search"]
    if start > HIGHEST_START or end < start + RISE:
        found.append(f"exact match went from {start:.3f} to {end:.3f}; wanted at most {HIGHEST_START} and {RISE} more")
    start, end = ends["random rewards"]
    if end > start + DRIFT:
        found.append(f"random rewards went from {start:.3f} to {end:.3f}, more than {DRIFT} up")
    start, end = ends["empty retriever"]
    if end > start:
        found.append(f"an empty retriever went from {start:.3f} to {end:.3f}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
