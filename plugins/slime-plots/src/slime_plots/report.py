"""The command ``slime report``: one HTML file about one run or several, which needs no network."""

from __future__ import annotations

import argparse
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from slime_core.errors import DataError
from slime_plots.coloured import STYLE, advantages, coloured
from slime_plots.curves import Chart, Rows, charts, named_runs, points
from slime_plots.figures import curve_grid, distribution, sampled_rows, step_shares, timeline
from slime_plots.spans import read_spans, trace_events, waits
from slime_plots.tokens import last_samples, read_tokens, tokenizer_of

__all__ = ["main", "page"]

EPILOG = """examples:
  slime report outputs/20261122-1                        writes outputs/20261122-1/report.html, also during the run
  slime report outputs/a outputs/b --out compare.html    curves of both, and the settings that differ
  slime report outputs/a --trace trace.json              also a trace for https://ui.perfetto.dev
"""

TRAIN_DATA = "save_debug_train_data"

# The page may fetch nothing (fonts, scripts, pictures), even if a sample's text contains HTML that tries.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1300px; padding: 0 1rem; color: #222; }
summary { font-size: 1.15rem; font-weight: 600; cursor: pointer; padding: .4rem 0; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { border: 1px solid #ddd; padding: .2rem .6rem; }
th { text-align: left; background: #f6f6f6; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
h4 { margin: 1rem 0 .2rem; }
"""

# A figure is drawn when its section is first opened, so that a page of a hundred charts opens quickly.
SCRIPT = """
const OPTIONS = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["sendChartToCloud"]};
function draw(section) {
  for (const place of section.querySelectorAll(":scope > .figure:empty")) {
    const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
    Plotly.newPlot(place, figure.data, figure.layout, OPTIONS);
  }
}
for (const section of document.querySelectorAll("details")) {
  section.addEventListener("toggle", () => section.open && draw(section));
  if (section.open) draw(section);
}
"""


def main(argv: Sequence[str]) -> int:
    """Write the page, and the trace of ``--trace``; return the exit code.

    Raises:
        DataError: a folder has no run, one of its files cannot be read, or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="slime report",
        description="One HTML file: curves, timeline, distributions and samples of a run; or runs compared.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, which may be in progress")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page [report.html in the first RUN]")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="also the timeline of the first RUN for Perfetto")
    parser.add_argument("--steps", metavar="N", type=int, default=20, help="steps in the timeline, the last N [20]")
    parser.add_argument("--rows", metavar="N", type=int, default=8, help="samples with coloured tokens [8]")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="of the tokenizer [the run's last checkpoint]")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0] / "report.html"
    _write(out, page(named_runs(options.runs), steps=options.steps, rows=options.rows, model=options.model))
    print(out)
    if options.trace is not None:
        _write(options.trace, json.dumps(trace_events(read_spans(options.runs[0]))))
        print(options.trace)
    return 0


def page(runs: Mapping[str, tuple[Path, Rows]], *, steps: int = 20, rows: int = 8, model: Path | None = None) -> str:
    """Return the page as HTML.

    Arguments:
        runs: name -> folder and metrics.
        steps: number of steps that the timelines show, counted from the end.
        rows: number of samples of a run whose tokens are shown.
        model: folder of the tokenizer; None means the last checkpoint of each run.
    """
    body = _Page()
    names = ", ".join(runs)
    body.html(f"<h1>{escape(names)}</h1><p>{escape('; '.join(_progress(*run) for run in runs.items()))}</p>")
    metrics = {name: metrics for name, (_, metrics) in runs.items()}
    if len(runs) > 1:
        body.section("Settings that differ", _differences({name: folder for name, (folder, _) in runs.items()}))
    for name, (folder, _) in runs.items():
        of_run = f": {name}" if len(runs) > 1 else ""
        body.section(f"Run{of_run}", _facts(folder), is_open=len(runs) == 1)
    _curves(body, metrics)
    for name, (folder, _) in runs.items():
        of_run = f": {name}" if len(runs) > 1 else ""
        body.section(f"Settings{of_run}", _all_settings(folder))
        _timeline(body, folder, of_run, steps)
        _distributions(body, folder, of_run)
        _samples(body, folder, of_run, rows, model)
    return body.text(title=f"slime: {names}")


class _Page:
    """Collects sections; the data of their figures goes to the end of the page."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._figures: list[str] = []

    def html(self, text: str) -> None:
        self._parts.append(text)

    def section(self, title: str, *parts: str | go.Figure, is_open: bool = False) -> None:
        """Add a foldable section. Strings are HTML."""
        shown = "".join(part if isinstance(part, str) else self._figure(part) for part in parts)
        self._parts.append(f"<details{' open' * is_open}><summary>{escape(title)}</summary>{shown}</details>")

    def text(self, *, title: str) -> str:
        head = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f"<style>{PAGE_STYLE}{STYLE}</style></head><body>"
        )
        scripts = f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script>"
        return "\n".join([head, *self._parts, *self._figures, scripts, "</body></html>"])

    def _figure(self, figure: go.Figure) -> str:
        name = f"figure-{len(self._figures)}"
        data = figure.to_json().replace("<", "\\u003c")  # so that no text in it closes the script element
        self._figures.append(f'<script type="application/json" id="{name}">{data}</script>')
        height = figure.layout.height
        return f'<div class="figure" data-figure="{name}" style="height:{height}px"></div>'


def _progress(name: str, run: tuple[Path, Rows]) -> str:
    steps = {step for metric in run[1].values() for step in metric}
    return (
        f"{name}: {len(steps)} rows of metrics, the last of step {max(steps)}" if steps else f"{name}: no metrics yet"
    )


def _curves(body: _Page, metrics: Mapping[str, Rows]) -> None:
    """Add the reward and the evaluations, open; then all other metrics, grouped by the prefix of their names."""
    overview = charts(metrics)
    body.section("Rewards and evaluations", curve_grid(overview) if overview else "<p>None yet.</p>", is_open=True)
    groups: dict[str, list[Chart]] = {}
    for metric in sorted({metric for rows in metrics.values() for metric in rows}):
        groups.setdefault(metric.partition("/")[0], []).append(points(metrics, metric))
    for group, group_charts in groups.items():
        body.section(f"{group}/ ({len(group_charts)} metrics)", curve_grid(group_charts))


def _timeline(body: _Page, folder: Path, of_run: str, steps: int) -> None:
    spans = read_spans(folder)
    if not any(spans.values()):
        return
    idle = waits(spans)
    phases = list(dict.fromkeys(name for row in idle.values() for name in row))
    header = ["process", *phases]
    cells = [[process, *(f"{row.get(name, 0.0):.1f}" for name in phases)] for process, row in idle.items()]
    table = f"<p>Idle seconds of a process, by the driver's activity at that time:</p>{_table(header, cells)}"
    body.section(f"Time of a step{of_run}", step_shares(spans), table, is_open=True)
    body.section(f"Timeline of the last {steps} steps{of_run}", timeline(spans, steps=steps))


def _distributions(body: _Page, folder: Path, of_run: str) -> None:
    titles = {"reward": "rewards", "response_length": "response lengths"}
    values: dict[str, dict[int, list[float]]] = {key: {} for key in titles}
    for rollout, rows in sampled_rows(folder):
        for key, of_key in values.items():
            numbers = [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
            if numbers:
                of_key[rollout] = numbers
    figures = [distribution(titles[key], of_key) for key, of_key in values.items() if of_key]
    if figures:
        body.section(f"Distributions by rollout{of_run}", *figures)


def _samples(body: _Page, folder: Path, of_run: str, rows: int, model: Path | None) -> None:
    if not any((folder / "samples").glob("*.jsonl")):
        return
    file = last_samples(folder)
    try:
        samples = list(read_tokens(file))[:rows]
    except DataError as problem:  # the run saved no tokens
        body.section(f"Samples{of_run}", f"<p>{escape(str(problem))}</p>")
        return
    template, rollout = dict(_settings(folder)).get(TRAIN_DATA), file.stem.removeprefix("train-")
    by_index = advantages(template, int(rollout)) if template and rollout.isdigit() else {}
    tokenizer = tokenizer_of(model, folder)
    sizes = (abs(value) for values in by_index.values() for value in values if not math.isnan(value))
    largest = max(sizes, default=0.0) or 1.0
    shown = "".join(coloured(sample, tokenizer, by_index.get(sample.index), largest=largest) for sample in samples)
    choice = _choice(f"colour{of_run}", has_advantages=bool(by_index))
    body.section(f"Samples of {file.name}{of_run}", f'<div class="samples"><p>Colour: {choice}</p>{shown}</div>')


def _choice(name: str, *, has_advantages: bool) -> str:
    """Return radio buttons that select the meaning of token colours; ``STYLE`` reads the selected one."""
    advantage = "red, white, blue" if has_advantages else "unknown without --save-debug-train-data"
    meanings = {
        "log-prob": "log-probability (red to green)",
        "advantage": f"advantage ({advantage})",
        "version": "weight version",
    }
    parts = []
    for number, (key, meaning) in enumerate(meanings.items()):
        button = f'<input type="radio" name="{escape(name)}" class="by-{key}"{" checked" * (not number)}>'
        parts.append(f"<label>{button} {meaning}</label>")
    return " ".join(parts)


def _differences(folders: Mapping[str, Path]) -> str:
    """Return a table of the settings whose values differ between the runs."""
    settings = {name: dict(_settings(folder)) for name, folder in folders.items()}
    names = sorted({setting for values in settings.values() for setting in values})
    rows = [[name, *(str(values.get(name, "not set")) for values in settings.values())] for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    return _table(["setting", *folders], differ) if differ else "<p>None.</p>"


def _facts(folder: Path) -> str:
    """Return a table of the run's model, plugins and duration."""
    settings = dict(_settings(folder)) if (folder / "config.toml").exists() else {}
    rows = [["model", str(settings.get("hf_checkpoint") or "the built-in arithmetic model")]] if settings else []
    rows += [[name, str(settings[name])] for name in SHOWN_SETTINGS if name in settings]
    rows.append(["plugins", ", ".join(_plugins(folder)) or "unknown"])
    rows.append(["duration", _duration(folder)])
    return _table(["", ""], rows)


SHOWN_SETTINGS = ("advantage_estimator", "prompt_data", "num_rollout", "seed", "load")
"""Settings in the first table, besides the model; all others have a section."""


def _plugins(folder: Path) -> Iterator[str]:
    """Yield name and version of each plugin of the run, as ``plugins.json`` holds them."""
    try:
        entries = json.loads((folder / "plugins.json").read_text(encoding="utf-8"))["plugins"]
        yield from [f"{entry['name']} {entry['version']}" for entry in entries]
    except (OSError, ValueError, LookupError, TypeError):
        return


def _duration(folder: Path) -> str:
    """Return the time from the first span to the last; pauses between the starts of a run count."""
    spans = [span for row in read_spans(folder).values() for span in row]
    if not spans:
        return "unknown"
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return str(timedelta(seconds=round(seconds)))


def _all_settings(folder: Path) -> str:
    if not (folder / "config.toml").exists():
        return "<p>None are written.</p>"
    rows = [[name, json.dumps(value, ensure_ascii=False, default=str)] for name, value in _settings(folder)]
    return _table(["setting", "value"], sorted(rows))


def _settings(folder: Path) -> Iterator[tuple[str, Any]]:
    try:
        tables = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{folder}/config.toml cannot be read: {problem}. Give the folder of a run.") from problem
    for table, values in tables.items():
        yield from values.items() if isinstance(values, dict) else [(table, values)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _write(path: Path, text: str) -> None:
    """Write to a temporary file, then replace ``path``."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}. Give another file.") from error
