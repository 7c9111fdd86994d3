"""Records the activities of each process of a run: one span a line in ``RUN/timeline/PROCESS.jsonl``.

    {"name": "log_probs", "step": 3, "start": 1764000000.125, "seconds": 1.9}

``start`` is seconds since 1970 by the clock of the process's machine. ``slime report`` draws the spans.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = "timeline"
"""Folder within the run folder."""


class Timeline:
    """Appends the spans of one process. What cannot be written is left out: it is for people, and no run needs it.

    Arguments:
        run: the run folder; None: nothing is written.
        process: names the file: ``driver``, ``sampler``, ``learner-0``.
    """

    def __init__(self, run: Path | None, process: str) -> None:
        self._path = None if run is None else run / FOLDER / f"{process}.jsonl"
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str, step: int | None) -> Iterator[None]:
        """The time in the context is a span; none if it fails."""
        start_s = time.monotonic()
        yield
        self.ended(name, step, time.monotonic() - start_s)

    def ended(self, name: str, step: int | None, seconds: float) -> None:
        """A span of ``seconds`` ends now."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self._path is None:
            return
        row = {"name": name, "step": step, "start": round(time.time() - seconds, 6), "seconds": round(seconds, 6)}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name of the spans that ended since the last call."""
        found, self._seconds = self._seconds, {}
        return found
