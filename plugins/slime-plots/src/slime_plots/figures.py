"""The plotly figures of ``slime report``: curves, shares of a step, a timeline, distributions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from slime_core.errors import DataError
from slime_plots.curves import Chart
from slime_plots.spans import Spans

__all__ = ["curve_grid", "distribution", "sampled_rows", "step_shares", "timeline"]

COLUMNS = 3
CHART_PX = 230
"""Height of one chart in the grid, in pixels."""

COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395")
MAX_FILES = 60
"""Limit on the sample files read for a distribution; they are spaced evenly."""

BINS = 30


def curve_grid(charts: Sequence[Chart]) -> go.Figure:
    """Return a grid with one chart a metric, one line a run; a run has the same colour in every chart."""
    rows = math.ceil(len(charts) / COLUMNS)
    titles = [chart.metric for chart in charts]
    figure = make_subplots(rows=rows, cols=COLUMNS, subplot_titles=titles, vertical_spacing=0.3 / max(rows, 1))
    runs = list(dict.fromkeys(run for chart in charts for run in chart.lines))
    shown: set[str] = set()
    for number, chart in enumerate(charts):
        for run, points in chart.lines.items():
            line = go.Scatter(
                x=[step for step, _ in points],
                y=[value for _, value in points],
                name=run,
                legendgroup=run,
                showlegend=len(runs) > 1 and run not in shown,
                mode="lines+markers" if len(points) < 20 else "lines",
                line={"color": COLOURS[runs.index(run) % len(COLOURS)]},
            )
            figure.add_trace(line, row=number // COLUMNS + 1, col=number % COLUMNS + 1)
            shown.add(run)
    figure.update_annotations(font_size=12)
    return _laid_out(figure, height=max(rows * CHART_PX, 300))


def step_shares(spans: Spans) -> go.Figure:
    """Return the stacked seconds of the driver's spans for each step."""
    totals: dict[str, dict[int, float]] = {}
    for span in spans.get("driver", ()):
        if span.step is not None:
            of_name = totals.setdefault(span.name, {})
            of_name[span.step] = of_name.get(span.step, 0.0) + span.seconds
    figure = go.Figure([go.Bar(x=list(steps), y=list(steps.values()), name=name) for name, steps in totals.items()])
    figure.update_layout(barmode="stack", xaxis_title="step", yaxis_title="seconds")
    return _laid_out(figure, height=300)


def timeline(spans: Spans, *, steps: int) -> go.Figure:
    """Return the spans of the last ``steps`` steps, one row per process; x in seconds from the first of these spans."""
    last = max(
        (span.step for process_spans in spans.values() for span in process_spans if span.step is not None), default=0
    )
    recent = [
        span.start for process_spans in spans.values() for span in process_spans if (span.step or 0) > last - steps
    ]
    first = (
        min(recent, default=0.0)
        if last >= steps
        else min((process_spans[0].start for process_spans in spans.values() if process_spans), default=0.0)
    )
    shown = [
        (process, span) for process, process_spans in spans.items() for span in process_spans if span.start >= first
    ]
    figure = go.Figure()
    for name in dict.fromkeys(span.name for _, span in shown):
        process_spans = [(process, span) for process, span in shown if span.name == name]
        bars = go.Bar(
            base=[round(span.start - first, 6) for _, span in process_spans],
            x=[span.seconds for _, span in process_spans],
            y=[process for process, _ in process_spans],
            name=name,
            orientation="h",
            width=0.6,
            customdata=["" if span.step is None else f"step {span.step}" for _, span in process_spans],
            hovertemplate=f"{name} %{{customdata}}<br>%{{x:.3f}} s from %{{base:.3f}} s<extra>%{{y}}</extra>",
        )
        figure.add_trace(bars)
    figure.update_layout(barmode="overlay", xaxis_title="seconds", yaxis={"autorange": "reversed"})
    return _laid_out(figure, height=160 + 45 * len(spans))


def sampled_rows(run: Path) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """Yield rollout number and samples of at most ``MAX_FILES`` rollouts, in order.

    Raises:
        DataError: a line is not a sample.
    """
    files = sorted((run / "samples").glob("train-*.jsonl"))
    for number in range(min(MAX_FILES, len(files))):
        file = files[round(number * (len(files) - 1) / max(min(MAX_FILES, len(files)) - 1, 1))]
        try:
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            yield int(file.stem.removeprefix("train-")), rows
        except ValueError as problem:
            raise DataError(f"{file} is not a file of samples: {problem}. Remove it, or give another run.") from problem


def distribution(title: str, values: Mapping[int, Sequence[float]]) -> go.Figure:
    """Return a heat map with one column a rollout: the fraction of its samples in each bin."""
    everything = [value for of_rollout in values.values() for value in of_rollout]
    least, most = min(everything), max(everything)
    width = (most - least) / BINS or 1.0
    columns = []
    for of_rollout in values.values():
        counts = [0] * BINS
        for value in of_rollout:
            counts[min(int((value - least) / width), BINS - 1)] += 1
        columns.append([count / max(len(of_rollout), 1) for count in counts])
    figure = go.Figure(
        go.Heatmap(
            x=list(values),
            y=[least + width * (number + 0.5) for number in range(BINS)],
            z=[list(row) for row in zip(*columns, strict=True)],
            colorscale="Blues",
            zmin=0,
            hovertemplate="rollout %{x}<br>about %{y:.4g}: %{z:.1%}<extra></extra>",
        )
    )
    figure.update_layout(title=title, xaxis_title="rollout")
    return _laid_out(figure, height=320)


def _laid_out(figure: go.Figure, *, height: int) -> go.Figure:
    return figure.update_layout(
        height=height, margin={"l": 60, "r": 20, "t": 50, "b": 50}, template="plotly_white", colorway=COLOURS
    )
