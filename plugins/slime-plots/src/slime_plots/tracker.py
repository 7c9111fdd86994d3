"""The tracker ``plots``: prints the charts of a run when it ends, and writes them to ``curves.svg``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from slime_core import RunView
from slime_plots.curves import METRICS_FILE, charts, read

__all__ = ["Plots"]


class Plots:
    """Plots from ``metrics.jsonl``, so that the charts of a resumed run start at its first step."""

    def __init__(self, options: None, run: RunView) -> None:
        self._folder = run.folder

    def start(self, run: RunView) -> None:
        self._folder = run.folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the charts are plotted from the file."""

    def close(self, error: BaseException | None) -> None:
        if self._folder is None or not (self._folder / METRICS_FILE).exists():
            return
        found = charts({self._folder.name: read(self._folder)})
        if not found:
            return
        from slime_plots.draw import as_text, save  # matplotlib takes a second to import

        print(as_text(found, width=shutil.get_terminal_size().columns, colour=sys.stdout.isatty()))
        save(found, self._folder / "curves.svg")
