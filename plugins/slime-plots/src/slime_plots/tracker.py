"""The tracker ``plots``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_plots.curves import METRICS_FILE, charts, read

if TYPE_CHECKING:
    from slime_core import RunView

__all__ = ["Plots"]


class Plots:
    """Charts of rewards and evaluations at the end of a run, in the terminal and as ``curves.svg``.

    They are plotted from ``metrics.jsonl``, so those of a resumed run start at its first step.
    """

    _folder: Path | None = None

    def start(self, run: RunView) -> None:
        self._folder = run.folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the charts are plotted from the file."""

    def close(self, error: BaseException | None) -> None:
        if self._folder is None or not (self._folder / METRICS_FILE).exists():
            return
        figures = charts({self._folder.name: read(self._folder)})
        if not figures:
            return
        from slime_plots.draw import as_text, save  # matplotlib takes a second to import

        print(as_text(figures, width=shutil.get_terminal_size().columns, colour=sys.stdout.isatty()))
        save(figures, self._folder / "curves.svg")
