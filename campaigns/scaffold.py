"""Writes a package of every kind with ``slime plugins new`` and does with it what its README says, on the real engines.

    python -m campaigns.scaffold FOLDER [KIND ...]        about a minute a kind on two cores

Each package is tested with its own tests and settings, built into a wheel, installed from that wheel into a folder, and
trained with the commands of its README, as they stand there. The table says what came of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from slime_testing.scaffold import KINDS, Scaffold

NAMES = {"lifecycle": "hooks"}
"""Names of the plugins; the others are called after their kind."""

LIMIT_S = 400


def main(folder: Path, kinds: list[str]) -> int:
    """Print the table; the number of kinds for which something failed."""
    print("| kind | its tests | wheel | show, check | run: reward, loss of both steps |")
    print("|---|---|---|---|---|")
    return sum(not row(kind, folder.resolve()) for kind in kinds or KINDS)


def row(kind: str, folder: Path) -> bool:
    """Print one line of the table; whether everything succeeded."""
    scaffold = Scaffold(kind, NAMES.get(kind, kind))
    package, site = folder / scaffold.distribution, folder / f"site-{kind}"
    for old in (package, site):
        shutil.rmtree(old, ignore_errors=True)
    slime("plugins", "new", kind, scaffold.name, "--dir", folder, where=folder, site=site)
    cells = [
        wheel(package, site),
        shown(scaffold, package, site),
        tests(package, site),
        trained(scaffold, package, site),
    ]
    built, offered, tested, ran = cells
    print(f"| {kind} | {tested} | {built} | {offered} | {ran} |", flush=True)
    return not any("failed" in cell for cell in cells)


def wheel(package: Path, site: Path) -> str:
    """Build the wheel and install it into ``site``."""
    built = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", where=package)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    found = sorted((package / "dist").glob("*.whl"))
    installed = run(sys.executable, "-m", "pip", *install, *map(str, found), where=package)
    return next((failed(step) for step in (built, installed) if step.returncode), f"{found[0].stat().st_size:,} bytes")


def tests(package: Path, site: Path) -> str:
    """Run the tests of the package in a process of their own."""
    started_s = time.monotonic()
    ended = run(sys.executable, "-m", "pytest", "-q", where=package, site=site)
    passed = re.search(r"(\d+) passed", ended.stdout)
    return failed(ended) if ended.returncode or not passed else f"{passed[0]}, {time.monotonic() - started_s:.0f} s"


def shown(scaffold: Scaffold, package: Path, site: Path) -> str:
    """Whether the installed plugin is listed, shown and checked."""
    for words in (("list",), ("show", scaffold.name), ("check", scaffold.name)):
        ended = slime("plugins", *words, where=package, site=site)
        if ended.returncode or scaffold.name not in ended.stdout:
            return failed(ended)
    return "yes"


def trained(scaffold: Scaffold, package: Path, site: Path) -> str:
    """Rewards and losses of the run that the README prints."""
    output = package / "outputs" / "run"
    for command in scaffold.commands:
        program, *words = command.split()
        if program == "slime":
            words = ["-m", "slime_core", *words, "--output-dir", str(output), "--progress", "none"]
        ended = run(sys.executable, *words, where=package, site=site)
        if ended.returncode:
            return failed(ended)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    return "; ".join(f"{step['rollout/raw_reward']:.3f}, {step['train/loss']:+.4f}" for step in steps)


def slime(*words: object, where: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The command of the environment that runs this."""
    return run(sys.executable, "-m", "slime_core", *map(str, words), where=where, site=site)


def run(*words: str, where: Path, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in ``where``, with what is installed in ``site``."""
    where.mkdir(parents=True, exist_ok=True)
    places = [place for place in (str(site or ""), os.environ.get("PYTHONPATH", "")) if place]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(words, cwd=where, env=around, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def failed(ended: subprocess.CompletedProcess[str]) -> str:
    """The last line that the program printed."""
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return f"failed: {lines[-1] if lines else ended.returncode}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
