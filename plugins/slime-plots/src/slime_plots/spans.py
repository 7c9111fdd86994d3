"""Timelines of the processes of a run, from ``RUN/timeline/PROCESS.jsonl``; waiting times and traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from slime_core.errors import DataError

__all__ = ["Span", "read_spans", "trace_events", "waits"]

DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Span:
    """Phase ``name`` of ``step`` (None: outside the steps), ``seconds`` long from ``start``, in seconds since 1970."""

    name: str
    step: int | None
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


Spans = Mapping[str, Sequence[Span]]
"""Process -> its spans, sorted by start. The driver comes first."""


def read_spans(run: Path) -> Spans:
    """Read the spans of every process; empty: the run wrote none. A last line without a newline is ignored.

    Raises:
        DataError: a line is not a span.
    """
    files = sorted((run / "timeline").glob("*.jsonl"), key=lambda file: (file.stem != DRIVER, _natural(file.stem)))
    return {file.stem: sorted(_spans(file), key=lambda span: span.start) for file in files}


def waits(spans: Spans) -> dict[str, dict[str, float]]:
    """Return process -> span of the driver at that time -> seconds in which the process had no span.

    Counts from the process's first span to its last; the driver itself is left out. A process that waits during
    ``rollout`` waits for the engines; one that waits during ``train`` waits for the learner.
    """
    by_process: dict[str, dict[str, float]] = {}
    for process, process_spans in spans.items():
        if process == DRIVER or not process_spans:
            continue
        idle = _gaps(_union(process_spans))
        names = dict.fromkeys(span.name for span in spans.get(DRIVER, ()))
        meanwhile = {name: _union(span for span in spans[DRIVER] if span.name == name) for name in names}
        by_process[process] = {name: _overlap(idle, phases) for name, phases in meanwhile.items()}
    return by_process


def trace_events(spans: Spans) -> dict[str, object]:
    """Convert to Chrome's trace format, in microseconds from the first span; https://ui.perfetto.dev opens it."""
    first = min((process_spans[0].start for process_spans in spans.values() if process_spans), default=0.0)
    events: list[dict[str, object]] = []
    for number, (process, process_spans) in enumerate(spans.items(), start=1):
        place = {"pid": number, "tid": number}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": process}})
        events.append({"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": number}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": "slime",
                "ts": round((span.start - first) * 1e6),
                "dur": round(span.seconds * 1e6),
                **place,
                "args": {} if span.step is None else {"step": span.step},
            }
            for span in process_spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _natural(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _spans(file: Path) -> Iterable[Span]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
            step = None if row["step"] is None else int(row["step"])
            yield Span(str(row["name"]), step, float(row["start"]), float(row["seconds"]))
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{file}:{number} is not a span of a timeline: {error!r}. Remove the line.") from error


Intervals = Sequence[tuple[float, float]]
"""Disjoint (start, end), sorted by start."""


def _union(spans: Iterable[Span]) -> Intervals:
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


def _gaps(intervals: Intervals) -> Intervals:
    return [(end, start) for (_, end), (start, _) in pairwise(intervals)]


def _overlap(these: Intervals, those: Intervals) -> float:
    """Return the seconds that are in both."""
    total, first, other = 0.0, 0, 0
    while first < len(these) and other < len(those):
        start, end = max(these[first][0], those[other][0]), min(these[first][1], those[other][1])
        total += max(0.0, end - start)
        if these[first][1] < those[other][1]:
            first += 1
        else:
            other += 1
    return total
