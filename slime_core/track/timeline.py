"""The spans of time that a process of a run spent, in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Timeline:
    """Appends what one process did when to ``RUN/timeline/PROCESS.jsonl``, one span a line.

        {"name": "log_probs", "step": 3, "start": 1764000000.125, "seconds": 1.9}

    ``start`` is seconds since 1970 by the clock of the process's machine. ``slime report`` draws the spans. Spans
    that cannot be written are dropped, because no run needs them.

    Arguments:
        run: the run folder. None writes nothing.
        process: names the file: ``driver``, ``sampler``, ``learner-0``.
    """

    def __init__(self, run: Path | None, process: str) -> None:
        self._path = None if run is None else run / "timeline" / f"{process}.jsonl"
        self._seconds: dict[str, float] = {}

    @contextmanager
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
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name of the spans that ended since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
