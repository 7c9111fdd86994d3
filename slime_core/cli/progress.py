"""Prints the progress of a run as lines, on a terminal above a bar, and a summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from slime_core.errors import table
from slime_core.track.track import EvalFinished, Event, Noted, PhaseStarted, StepFinished, Warned

if TYPE_CHECKING:
    import rich.progress


PER_STEP = (
    ("rollout/raw_reward", "reward {:.3f}"),
    ("rollout/response_len/mean", "{:.0f} tokens per response"),
    ("train/loss", "loss {:+.4f}"),
    ("train/grad_norm", "grad norm {:.3f}"),
    ("perf/tokens_per_gpu_per_sec", "{:.0f} tokens/s/device"),
    ("perf/step_time", "{:.2f} s"),
)


class Progress:
    """A listener of the events of a run, and a context manager that shows the bar.

    Arguments:
        steps: training steps of the run.
        shown: the setting ``progress``.

    Attributes:
        first, last: the first and the last evaluation, for the summary.
    """

    def __init__(self, *, steps: int, shown: Literal["auto", "live", "lines", "none"]) -> None:
        self.first: Mapping[str, float] = {}
        self.last: Mapping[str, float] = {}
        self._steps = steps
        self._prints = shown != "none"
        self._has_bar = shown == "live" or (shown == "auto" and sys.stdout.isatty())
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Progress:
        if self._has_bar:
            from rich.progress import Progress as Bar

            self._bar = Bar()  # printed lines appear above it
            self._bar.add_task("starting", total=self._steps)
            self._bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case PhaseStarted(phase, _):
                self._update_bar(phase)
            case StepFinished(step, metrics):
                # Steps are shown from 1.
                numbers = " · ".join(text.format(metrics[name]) for name, text in PER_STEP if name in metrics)
                self._print(f"step {step + 1}/{self._steps}: {numbers}")
                self._update_bar("next step", completed=step + 1)
            case EvalFinished(version, metrics):
                self.first, self.last = self.first or metrics, metrics
                shown = " · ".join(f"{name} {value:.3f}" for name, value in _headlines(metrics).items())
                self._print(f"evaluation of weights {version}: {shown}")
            case Warned(message):
                self._print(f"warning: {message}")
            case Noted(message):
                self._print(message)

    def _print(self, text: str) -> None:
        if self._prints:
            print(text, flush=True)

    def _update_bar(self, phase: str, *, completed: int | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=phase, completed=completed)


def summary(
    *,
    start: Mapping[str, float],
    end: Mapping[str, float],
    seconds: float,
    paths: Sequence[tuple[str, Path]],
    stream: TextIO | None = None,
) -> None:
    """Print the evaluations at start and end, the duration of the run, and the paths of its files.

    Arguments:
        start: evaluation before the first step, ``{"eval/arithmetic": 0.34, "eval/arithmetic/carry": 0.01}``. A name
            below another is a part of it, such as a difficulty, and is printed indented.
        end: the last evaluation.
        seconds: wall time of the command.
        paths: label and path of each file, ``[("metrics", Path("runs/7/metrics.jsonl"))]``.
    """
    rows = []
    for name in sorted({*start, *end}):
        if not _is_detail(name):
            before, after, digits = start.get(name), end.get(name), 0 if _counts_failures(name) else 3
            change = None if before is None or after is None else after - before
            rows.append((_label(name), _cell(before, digits), _cell(after, digits), _cell(change, digits, sign="+")))
    lines = ["", table(rows, head=("evaluation", "start", "end", "change")), ""] if rows else []
    lines += [f"Took {_duration(seconds)}.", *(f"  {label}: {path}" for label, path in paths)]
    print("\n".join(lines), file=stream)


def _cell(value: float | None, digits: int, *, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def _headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return set or part -> its score."""
    shown = (name for name in metrics if name.count("/") == 1 and not _is_detail(name))
    return {name.removeprefix("eval/"): metrics[name] for name in shown}


def _is_detail(name: str) -> bool:
    # Metrics such as eval/aime-truncated_ratio and eval/aime/response_len/mean are recorded and not printed.
    written_only = name == "eval/weight_version" or name.endswith(("-truncated_ratio", "-left_out")) or "-pass@" in name
    return written_only or not name.startswith("eval/") or name.count("/") > 2


def _counts_failures(name: str) -> bool:
    """Return whether the metric counts the samples of an evaluation that failed."""
    _, dataset, *causes = name.split("/")
    return dataset.endswith("-failed") and bool(causes) and "=" not in causes[0]


def _label(name: str) -> str:
    parts = name.split("/")[1:]
    return "  " * (len(parts) - 1) + ("failed: " if _counts_failures(name) else "") + parts[-1]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
