"""Converts the ``metrics.jsonl`` of runs to charts: one chart a metric, one line a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from slime_core.errors import DataError

__all__ = ["MAX_CHARTS", "METRICS_FILE", "Chart", "Rows", "charts", "named_runs", "points", "read"]

METRICS_FILE = "metrics.jsonl"
MAX_CHARTS = 12
"""Limit on charts: more fit neither a terminal nor a page."""

Rows = Mapping[str, Mapping[int, float]]
"""Metric -> step -> value."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric of one or several runs: ``lines`` maps a run's name to its points ``(step, value)``, by step."""

    metric: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


def read(folder: Path) -> Rows:
    """Read the metrics of the run in ``folder``.

    A last line without a newline is ignored: the run may still be writing it.

    Raises:
        DataError: the folder has no run, or a line is not a row of metrics.
    """
    path = folder / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}.\n"
            f"Give the folder of a run, which has {METRICS_FILE}: slime plot outputs/RUN"
        ) from error
    by_metric: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            step, metrics = _row(path, number, line)
            for metric, value in metrics.items():
                by_metric.setdefault(metric, {})[step] = value
    return by_metric


def charts(runs: Mapping[str, Rows], patterns: Sequence[str] = ()) -> list[Chart]:
    """Return the charts of ``runs``, in the order in which the runs wrote the metrics.

    Arguments:
        patterns: names of metrics or globs (``eval/*``); empty: the reward, and one score for each evaluation set.

    Raises:
        DataError: a pattern matches no metric, or there are more than ``MAX_CHARTS`` charts.
    """
    metrics = list(dict.fromkeys(metric for rows in runs.values() for metric in rows))
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(metric, pattern) for metric in metrics)]
    if unknown:
        raise DataError(f"No run has a metric {unknown[0]!r}. They have: {', '.join(sorted(metrics)) or 'none'}.")
    chosen = [metric for metric in metrics if _is_chosen(metric, patterns)]
    if len(chosen) > MAX_CHARTS:
        raise DataError(
            f"{len(chosen)} metrics are selected; at most {MAX_CHARTS} are drawn at once. "
            "Select fewer: --metric NAME ..."
        )
    return [points(runs, metric) for metric in chosen]


def points(runs: Mapping[str, Rows], metric: str) -> Chart:
    """Return the chart of ``metric``, with the runs that have it."""
    return Chart(metric, {name: sorted(rows[metric].items()) for name, rows in runs.items() if metric in rows})


def named_runs(folders: Sequence[Path]) -> dict[str, tuple[Path, Rows]]:
    """Return name -> folder and metrics of each run; the name is the folder's, or the whole path if two are equal.

    Raises:
        DataError: see :func:`read`.
    """
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return {
        name if unique else str(folder): (folder, read(folder)) for name, folder in zip(names, folders, strict=True)
    }


def _row(path: Path, number: int, line: str) -> tuple[int, dict[str, float]]:
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
        return step, {metric: float(value) for metric, value in row.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f'{path}:{number} is not a row of metrics, such as {{"step": 0, "train/loss": 0.5}}: {error!r}.\n'
            "Remove the line, or give the folder of another run."
        ) from error


def _is_chosen(metric: str, patterns: Sequence[str]) -> bool:
    if patterns:
        return any(fnmatchcase(metric, pattern) for pattern in patterns)
    return metric == "rollout/raw_reward" or _is_score(metric)


def _is_score(metric: str) -> bool:
    """Return whether it is the score of an evaluation set (``eval/aime``), not a detail (``eval/aime-failed``)."""
    name = metric.removeprefix("eval/")
    if name in (metric, "weight_version") or "/" in name or "-pass@" in name:
        return False
    return not name.endswith(("-truncated_ratio", "-left_out", "-failed"))
