"""Charts as text for a terminal (plotext), and as a picture (matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotext
from matplotlib import rc_context
from matplotlib.figure import Figure

from slime_core.errors import DataError
from slime_plots.curves import Chart

__all__ = ["PICTURES", "as_text", "save"]

PICTURES = (".svg", ".png", ".pdf")
X_LABEL = "rollouts trained"

TEXT_HEIGHT = 14
"""Height of a chart in a terminal, in rows, including its title and labels."""

WIDTH_IN, HEIGHT_IN = 6.4, 2.6
"""Size of a chart in a picture, in inches."""


def as_text(charts: Sequence[Chart], *, width: int, colour: bool) -> str:
    """Return the charts below each other, ``width`` columns wide; ``colour``: with terminal colour codes."""
    return "\n".join(_text(chart, max(width, 40), colour) for chart in charts)


def save(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts to ``path``, in the format of its suffix; an existing file is replaced atomically.

    Raises:
        DataError: the suffix is not one of ``PICTURES``, or the file cannot be written.
    """
    if path.suffix not in PICTURES:
        raise DataError(f"{path}: the suffix selects the format of the picture. Give one of {', '.join(PICTURES)}.")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # With a fixed salt and no date, the same run always gives the same file.
        with rc_context({"svg.hashsalt": "slime"}):
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            _figure(charts).savefig(partial, format=path.suffix[1:], metadata=metadata)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}. Give another file: --out FILE.") from error


def _text(chart: Chart, width: int, colour: bool) -> str:
    figure: Any = plotext.figure  # plotext has one figure a process
    figure.clear()
    figure.plot_size(width, TEXT_HEIGHT)
    figure.title(chart.metric)
    figure.label(X_LABEL, "x")
    for run, points in chart.lines.items():
        steps, values = zip(*points, strict=True)
        signal = figure.signal(list(steps), list(values))
        signal.lines(len(points) > 1)
        if len(chart.lines) > 1:
            signal.label(run)
        figure.draw(signal)
    everything = [point for points in chart.lines.values() for point in points]
    # At the bottom right, because rewards and scores usually rise.
    figure.legend(
        x=max(x for x, _ in everything), y=min(y for _, y in everything), ha="right", va="bottom", relative=True
    )
    text: str = figure.build().string(colorless=not colour)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _figure(charts: Sequence[Chart]) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(charts)), layout="constrained")
    for chart, axes in zip(charts, figure.subplots(len(charts), 1, squeeze=False)[:, 0], strict=True):
        for run, points in chart.lines.items():
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=run, marker="o" if len(points) < 20 else None, markersize=3)
        axes.set(title=chart.metric, xlabel=X_LABEL)
        axes.grid(alpha=0.3)
        if len(chart.lines) > 1:
            axes.legend(fontsize="small")
    return figure
