"""How soon the prompts of a large file are there, and how much memory they hold: the table of docs/data.md.

    python bench/streaming.py outputs/streaming --gigabytes 10

Writes a JSON Lines file of that size, opens it in each order in a process of its own, draws 1,000 prompts, and deletes
the file. Start: until the first 32 prompts are there, imports left out. Memory: the process's largest resident set
above what it held after its imports; pages of the file that the kernel caches are not the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime_core import PromptRequest
from slime_core.data.prompts import PromptFiles

ORDERS: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "window of 10,000": {"window": 10_000},
    "exact, first start": {},
    "exact, later starts": {},
}
ROW_BYTES = 1024


def written(path: Path, gigabytes: float) -> None:
    """A file of 1 KiB rows; 4,096 different texts under numbers of their own."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefghij klmnopqrst", k=ROW_BYTES - 40)) for _ in range(4096)]
    rows = int(gigabytes * 10**9 / ROW_BYTES)
    with path.open("w", encoding="utf-8", buffering=2**22) as file:
        for number in range(rows):
            file.write(f'{{"prompt": "{number:010d} {texts[number % 4096]}"}}\n')


def measured(path: Path, order: str) -> dict[str, float]:
    """In this process: seconds to the first 32 prompts, to 1,000, to be back after a restart; MB held."""
    request = PromptRequest(path, label_key=None, streams=True, **ORDERS[order])
    before, begun = _peak(), time.monotonic()
    source = PromptFiles(request=request)
    source.next_groups(32)
    start_s = time.monotonic() - begun
    source.next_groups(968)
    drawn_s = time.monotonic() - begun - start_s
    state = json.dumps(source.state())
    begun = time.monotonic()
    resumed = PromptFiles(request=request)
    resumed.restore(json.loads(state))
    again = resumed.next_groups(32)
    restart_s = time.monotonic() - begun
    if again != source.next_groups(32):
        raise SystemExit(f"{order}: a restored source goes on with other prompts")
    held = (_peak() - before) / 1000
    return {"start_s": start_s, "drawn_s": drawn_s, "restart_s": restart_s, "held_mb": held, "state": len(state)}


def _peak() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Write, measure each order in a fresh process, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--order", choices=ORDERS, help="measure one order of the file that is there")
    given = parser.parse_args()
    path = given.folder / "prompts.jsonl"
    if given.order:
        print(json.dumps(measured(path, given.order)))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        written(path, given.gigabytes)
        print(f"{path.stat().st_size / 1e9:.1f} GB\n")
        print(
            "| order | start, s | 1,000 prompts, s | restart, s | held, MB | state, bytes |\n|---|---|---|---|---|---|"
        )
        environment = {**os.environ, "XDG_CACHE_HOME": str(given.folder / "cache")}
        for order in ORDERS:
            command = [sys.executable, __file__, str(given.folder), "--order", order]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found = json.loads(done.stdout)
            print(
                f"| {order} | {found['start_s']:.2f} | {found['drawn_s']:.2f} | {found['restart_s']:.2f} "
                f"| {found['held_mb']:.0f} | {found['state']} |",
                flush=True,
            )
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
