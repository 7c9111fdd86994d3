"""Time to the first prompts of a large file, and the memory that they take: the table of docs/data.md.

    python -m bench.streaming outputs/streaming --gigabytes 10

Writes a JSON Lines file of that size, opens it in each order in a process of its own, reads 1,000 prompts, and deletes
the file. Start: the look that a run takes at the file before anything else starts, and then until the first 32 prompts
are there; imports are left out. Memory: the largest resident set of the process, Python and all.
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

from slime_core import RunView
from slime_core.provisional import PromptRequest, PromptScreen
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles

ORDERS: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "window of 10,000": {"shuffle_window": 10_000},
    "exact, first start": {},
    "exact, later starts": {},
}
ROW_BYTES = 1024
HEAD = """| order | start, s (of a CPU core) | 968 more | restart | process, MB | cursor, bytes |
|---|---|---|---|---|---|"""


def written(path: Path, gigabytes: float) -> None:
    """Write a file of 1 KiB rows: 4,096 different texts, each row with a unique number."""
    random_source = random.Random(0)
    texts = ["".join(random_source.choices("abcdefghij klmnopqrst", k=ROW_BYTES - 40)) for _ in range(4096)]
    rows = int(gigabytes * 10**9 / ROW_BYTES)
    with path.open("w", encoding="utf-8", buffering=2**22) as file:
        for number in range(rows):
            file.write(f'{{"prompt": "{number:010d} {texts[number % 4096]}"}}\n')


def measured(path: Path, order: str) -> dict[str, Any]:
    """Measure start, next prompts and restart in this process; return seconds and resident MB."""
    own = dict(ORDERS[order])
    request = PromptRequest(path, label_key=None, shuffle=own.pop("shuffle", True))
    options, run = DatasetsOptions(streaming_data=True, **own), RunView(prompts=request)
    clock = _Clock()
    PromptFiles.screen(options, run, PromptScreen(setting="prompt_data"))
    source = PromptFiles(options, run)
    source.next_groups(32)
    start = clock.lap()
    source.next_groups(968)
    more = clock.lap()
    state = json.dumps(source.state())
    resumed = PromptFiles(options, run)
    resumed.restore(json.loads(state))
    again = resumed.next_groups(32)
    restart = clock.lap()
    if again != source.next_groups(32):
        raise SystemExit(f"{order}: a restored source goes on with other prompts")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"start": start, "more": more, "restart": restart, "peak_mb": peak_mb, "state": len(state)}


class _Clock:
    """Seconds since the last call, as ``elapsed (of a CPU core)``."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def lap(self) -> str:
        now = time.monotonic(), time.process_time()
        elapsed, busy = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return f"{elapsed:.2f} ({busy:.2f})"


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
        print(HEAD)
        environment = {**os.environ, "XDG_CACHE_HOME": str(given.folder / "cache")}
        for order in ORDERS:
            command = [sys.executable, __file__, str(given.folder), "--order", order]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found = json.loads(done.stdout)
            row = [order, found["start"], found["more"], found["restart"], f"{found['peak_mb']:.0f}", found["state"]]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
