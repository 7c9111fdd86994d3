"""Runs all parts of the GPU kit and writes ``results.json`` and ``table.md``. Exit status: 1 if a check failed.

    gpu_kit/run [PART ...] [--output FOLDER] [--wheels FOLDER] [--installed] [--limit-s 570]

Wheels are installed into a scratch folder, so the machine's environment is unchanged. Each part is a process, so a
crash or a hang costs only its own part; rows that it reported before are in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = ("machine", "attention", "experts", "numerics", "learner", "mixture", "sharing", "collective")
ROOM = "gpu_kit"
PACKAGES = tuple(
    ROOT / name
    for name in ("", "plugins/slime-cpu", "plugins/slime-datasets", "plugins/slime-grpo", "plugins/slime-models")
)
WHEELS, OUTPUT = ROOT / "outputs/gpu-kit/wheels", ROOT / "outputs/gpu-kit/results"
GPU_SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""As in learner ranks: slime_core.runtime.machine.rank_environment."""

Row = dict[str, Any]
"""``part``, and the arguments of gpu_kit.report.report."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of `make gpu-kit`")
    parser.add_argument("--installed", action="store_true", help="use the packages of this environment, not the wheels")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all parts; one part has at most half of it")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; accepted: {', '.join(PARTS)}")
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slime-gpu-kit-") as name:
        scratch = Path(name)
        if not options.installed:
            if not any(options.wheels.glob("*.whl")):
                parser.error(f"{options.wheels} has no wheels. Run `make gpu-kit` where there is a network.")
            install(options.wheels, scratch / "site")
        declare(scratch / "site")
        environment = environment_of(scratch)
        rows: list[Row] = []
        for part in options.parts or PARTS:
            left_s = min(options.limit_s / 2, start_s + options.limit_s - time.monotonic())
            rows += run_part(part, scratch, environment, limit_s=left_s)
    write(rows, options.output, seconds=time.monotonic() - start_s)
    return 1 if any(row["ok"] is False for row in rows) else 0


def install(wheels: Path, site: Path) -> None:
    """Install the wheels for this Python, and nothing that they depend on."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, *sorted(map(str, wheels.glob("*.whl")))], check=True)


def declare(site: Path) -> None:
    """Write the metadata by which slime finds the plugins of this checkout, whose code is read in place."""
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        name, version = project["name"], project["version"]
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = (
            "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())])
            for group, entries in project.get("entry-points", {}).items()
        )
        (folder / "entry_points.txt").write_text("\n".join(groups) + "\n")


def environment_of(scratch: Path) -> dict[str, str]:
    sources = [package / "src" for package in PACKAGES if package != ROOT]
    path = [str(one) for one in (scratch / "site", ROOT, *sources)]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**GPU_SETTINGS, **os.environ, "PYTHONPATH": os.pathsep.join(path), "SLIME_GPU_KIT": str(scratch)}


def run_part(part: str, scratch: Path, environment: Mapping[str, str], *, limit_s: float) -> list[Row]:
    """Run a part and return its rows; the last one says how the process ended if it did not end well."""
    number = f"{PARTS.index(part) + 1}. {part}"
    if limit_s < 1:
        return [_row("the part", "not run: no time left", ok=False, part=number)]
    file, log = scratch / f"{part}.jsonl", scratch / f"{part}.log"
    print(f"{number} ...", end=" ", flush=True)
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{ROOM}.{part}"],
            cwd=ROOT,
            env={**environment, "SLIME_GPU_KIT_ROWS": str(file)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children end with it
        )
        try:
            status = process.wait(timeout=limit_s)
            how = f"exit status {status}"
        except subprocess.TimeoutExpired:
            how, status = f"stopped after {limit_s:.0f} s", 1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start_s
    print(f"{seconds:.0f} s" + (f", {how}" if status else ""), flush=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if status:
        text = log.read_text(errors="replace")
        print(text[-3000:], flush=True)
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
        rows.append(_row("the process", f"{how}: {last[:200]}", expected="ends by itself", ok=False))
    rows.append(_row("seconds of the part", round(seconds, 1), unit="s", ok=None))
    return [{"part": number, **row} for row in rows]


def _row(check: str, figure: object, *, unit: str = "", expected: str = "", **more: object) -> Row:
    return {"check": check, "figure": figure, "unit": unit, "expected": expected, **more}


def write(rows: Sequence[Row], folder: Path, *, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1)}
    (folder / "results.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    (folder / "table.md").write_text(table(rows))
    failed = sum(row["ok"] is False for row in rows)
    print(f"{failed} checks failed, {seconds:.0f} s; {folder}/table.md, results.json")


VERDICTS = {True: "ok", False: "**failed**", None: ""}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| part | check | result | expected | |", "|---|---|---|---|---|"]
    for row in rows:
        figure = row["figure"]
        text = f"{figure:,.4g}" if isinstance(figure, float) else f"{figure:,}" if isinstance(figure, int) else figure
        cells = [row["part"], row["check"], f"{text} {row['unit']}".strip(), row["expected"], VERDICTS[row["ok"]]]
        lines.append("| " + " | ".join(f"{cell}".replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
