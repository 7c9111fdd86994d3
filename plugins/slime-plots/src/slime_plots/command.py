"""The command ``slime plot``: charts of one run, or of several for comparison."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_core.errors import DataError
from slime_plots.curves import METRICS_FILE, charts, named_runs

__all__ = ["main"]

EPILOG = """examples:
  slime plot outputs/20261122-1                       the reward and the evaluations, in the terminal
  slime plot outputs/a outputs/b --out compare.png    two runs in the same charts
  slime plot outputs/a --metric train/grad_norm 'train/*diff'
"""


def main(argv: Sequence[str]) -> int:
    """Print the charts of the runs, and write them to the file of ``--out``; return the exit code.

    Raises:
        DataError: a folder has no run, a metric is unknown, or the file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="slime plot",
        description=f"Charts of {METRICS_FILE}: one chart for each metric, one line for each run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="metrics, also as 'eval/*' [the reward and the score of each evaluation set]",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write a picture: .svg, .png or .pdf")
    options = parser.parse_args(argv)
    runs = {name: rows for name, (_, rows) in named_runs(options.runs).items()}
    figures = charts(runs, options.metric)
    if not figures:
        raise DataError("The runs have no reward and no evaluation yet. Select other metrics: --metric NAME ...")
    from slime_plots.draw import as_text, save  # matplotlib takes a second to import

    if options.out is not None:
        save(figures, options.out)
    print(as_text(figures, width=shutil.get_terminal_size().columns, colour=sys.stdout.isatty()))
    return 0
