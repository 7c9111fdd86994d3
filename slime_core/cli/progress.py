"""Prints the progress of a run: a live table on a terminal, one line a step elsewhere, and a summary at the end.

    LiveProgress    rich, redrawn in place
    PlainProgress   lines for logs
    summary         evaluation at start and end, time and paths, printed once

Both displays fold events into the same :class:`Shown`, so they cannot tell different stories.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slime_core.track.track import EvalFinished, Event, PhaseStarted, StepFinished, Warned

if TYPE_CHECKING:
    from rich.console import RenderableType


PER_STEP = (
    ("rollout/raw_reward", "reward {:.3f}"),
    ("rollout/response_len/mean", "{:.0f} tokens a response"),
    ("train/loss", "loss {:+.4f}"),
    ("train/grad_norm", "grad norm {:.3f}"),
    ("perf/tokens_per_gpu_per_sec", "{:.0f} tokens/s/device"),
    ("perf/step_time", "{:.2f} s"),
)


@dataclass(slots=True)
class Shown:
    """The newest values of a run.

    Arguments:
        steps: number of training steps the run will have done at its end.
        phase: what happens now.
        step: the step that runs or ended last; None before the first.
        done: number of steps that have ended, earlier sessions of a resumed run included.
        metrics: of the last step that ended.
        evaluations: by weight version, in the order measured.
    """

    steps: int
    phase: str = "starting"
    step: int | None = None
    done: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def hear(self, event: Event) -> None:
        """Fold ``event`` in."""
        match event:
            case PhaseStarted(phase, step):
                self.phase, self.step = phase, self.step if step is None else step
            case StepFinished(step, metrics):
                self.step, self.done, self.metrics = step, step + 1, metrics
            case EvalFinished(version, metrics):
                self.evaluations[version] = metrics

    def counter(self) -> str:
        """``step 3/40``; people count from 1."""
        return f"step {0 if self.step is None else self.step + 1}/{self.steps}"

    def numbers(self) -> str:
        """The last step in one line; what the step does not report is left out."""
        return " · ".join(text.format(self.metrics[name]) for name, text in PER_STEP if name in self.metrics)

    def accuracy(self) -> str:
        """Each evaluation from its first value to its last, ``arithmetic 0.340 → 0.974``."""
        courses: dict[str, list[str]] = {}
        for metrics in list(self.evaluations.values()):  # the display's own thread reads while the loop writes
            for name, value in _headlines(metrics).items():
                courses.setdefault(name, []).append(f"{value:.3f}")
        return " · ".join(f"{name} {' → '.join([*values[:1], *values[1:][-1:]])}" for name, values in courses.items())


class PlainProgress:
    """One line a step, evaluation and warning to ``stream``."""

    def __init__(self, *, steps: int, stream: TextIO | None = None) -> None:
        self._shown = Shown(steps)
        self._stream = stream or sys.stdout

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream.flush()

    def __call__(self, event: Event) -> None:
        self._shown.hear(event)
        match event:
            case StepFinished():
                self._line(f"{self._shown.counter()}: {self._shown.numbers()}")
            case EvalFinished(version, metrics):
                shown = " · ".join(f"{name} {value:.3f}" for name, value in _headlines(metrics).items())
                self._line(f"evaluation of weights {version}: {shown}")
            case Warned(message):
                self._line(f"warning: {message}")

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveProgress:
    """A table redrawn in place on a terminal; warnings scroll away above it and stay readable.

    Arguments:
        steps: number of steps at the end.
        now_s: the clock, seconds.
    """

    def __init__(self, *, steps: int, now_s: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._shown = Shown(steps)
        self._now_s = now_s
        self._started_s = now_s()
        self._console = Console()
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._shown.phase = "stopped" if any(reason) else "finished"
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._shown.hear(event)
        if isinstance(event, Warned):
            self._console.print(f"warning: {event.message}", style="yellow", markup=False, highlight=False)

    def render(self) -> RenderableType:
        """The table as it is now."""
        from rich.markup import escape
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        table.add_row(self._shown.counter(), ProgressBar(total=self._shown.steps, completed=self._shown.done, width=40))
        for label, text in self.rows():
            table.add_row(label, escape(text))
        return table

    def rows(self) -> list[tuple[str, str]]:
        """The table's lines as label and text; empty ones are left out."""
        elapsed = _duration(self._now_s() - self._started_s)
        lines = [
            ("phase", f"{self._shown.phase}, {elapsed}"),
            ("last step", self._shown.numbers()),
            ("evaluation", self._shown.accuracy()),
        ]
        return [(label, text) for label, text in lines if text]


def summary(
    *,
    start: Mapping[str, float],
    end: Mapping[str, float],
    seconds: float,
    paths: Sequence[tuple[str, Path]],
    stream: TextIO | None = None,
) -> None:
    """Print what the run changed: every evaluation at start and end, the time it took, where its files are.

    Arguments:
        start: evaluation before the first step, ``{"eval/arithmetic": 0.34, "eval/arithmetic/carry": 0.01}``: what is
            below a name is a part of it, such as a difficulty, and is printed indented.
        end: the last evaluation.
        seconds: wall time of the whole command.
        paths: what is where, ``[("metrics", Path("runs/7/metrics.jsonl"))]``.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("evaluation", "start", "end", "change"):
        table.add_column(header, justify="left" if header == "evaluation" else "right")
    for name in sorted({*start, *end}):
        if not _is_detail(name):
            before, after, digits = start.get(name), end.get(name), 0 if _counts_failures(name) else 3
            cells = ["-" if value is None else f"{value:.{digits}f}" for value in (before, after)]
            change = "-" if before is None or after is None else f"{after - before:+.{digits}f}"
            table.add_row(_label(name), *cells, change)
    if table.row_count:
        console.print(table)
    console.print(f"Took {_duration(seconds)}.")
    for label, path in paths:
        console.print(f"  {label}: {path}", soft_wrap=True)


def _headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Set or part -> its score."""
    shown = (name for name in metrics if name.count("/") == 1 and not _is_detail(name))
    return {name.removeprefix("eval/"): metrics[name] for name in shown}


def _is_detail(name: str) -> bool:
    # eval/aime-truncated_ratio, eval/aime/response_len/mean: written down, not on the front page.
    written_only = name == "eval/weight_version" or name.endswith(("-truncated_ratio", "-left_out")) or "-pass@" in name
    return written_only or not name.startswith("eval/") or name.count("/") > 2


def _counts_failures(name: str) -> bool:
    """Whether a metric is no score but the samples of an evaluation that failed of a cause."""
    _, own, *below = name.split("/")
    return own.endswith("-failed") and bool(below) and "=" not in below[0]


def _label(name: str) -> str:
    parts = name.split("/")[1:]
    return "  " * (len(parts) - 1) + ("failed: " if _counts_failures(name) else "") + parts[-1]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
