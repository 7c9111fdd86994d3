"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from campaigns import exactness
from campaigns.exactness.layouts import SMALL, WHOLE
from campaigns.exactness.matrix import FLOAT64, Matrix
from campaigns.exactness.mutants import MUTANTS, SMALL_MUTANTS, Mutant
from campaigns.exactness.outcome import Difference
from campaigns.exactness.report import print_matrix, print_mutants, print_rows
from tests.ranks import prepare


def main() -> None:
    options = _parser().parse_args()
    wanted, mutants = _wanted(options), _mutants(options)
    began = time.monotonic()
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        found = Matrix.make(options.keep or Path(folder)).run(wanted, mutants)
    count = len(found) - len(mutants)
    _report(found[:count], mutants, found[count:])
    print(f"\n{count} trainings and {len(mutants)} mutants in {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(_as_json(found[:count], mutants, found[count:])))
    sys.exit(_is_wrong(found[:count], found[count:]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns.exactness",
        description=exactness.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="some layouts, cases and mutants")
    parser.add_argument("--mutants", action="store_true", help="all mutants; alone, or with --small")
    parser.add_argument("--no-mutants", action="store_true", help="with --small: what `make test` runs")
    parser.add_argument("--layouts", nargs="*", help="only these")
    parser.add_argument("--cases", nargs="*", help="only these")
    parser.add_argument("--keep", type=Path, help="leave models and records in this empty folder")
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    return parser


def _wanted(options: argparse.Namespace) -> Mapping[str, Sequence[str]]:
    whole = SMALL if options.small else {} if options.mutants else WHOLE
    chosen = {
        layout: [case for case in cases if not options.cases or case in options.cases]
        for layout, cases in whole.items()
        if not options.layouts or layout in options.layouts
    }
    return {layout: cases for layout, cases in chosen.items() if cases}


def _mutants(options: argparse.Namespace) -> Sequence[Mutant]:
    return MUTANTS if options.mutants else SMALL_MUTANTS if options.small and not options.no_mutants else ()


def _report(rows: Sequence[Difference], mutants: Sequence[Mutant], of_mutants: Sequence[Difference]) -> None:
    if rows:
        print_rows(rows)
        print()
        print_matrix(rows)
    if mutants:
        print()
        print_mutants(mutants, of_mutants)


def _as_json(rows: Sequence[Difference], mutants: Sequence[Mutant], of_mutants: Sequence[Difference]) -> dict[str, Any]:
    named = zip(mutants, of_mutants, strict=True)
    return {"rows": [asdict(row) for row in rows], "mutants": {mutant.name: asdict(row) for mutant, row in named}}


def _is_wrong(rows: Sequence[Difference], of_mutants: Sequence[Difference]) -> bool:
    exact = all(row.is_equal for row in rows if FLOAT64 not in row.layout)
    return not exact or not all(row.is_noticed for row in of_mutants)


if __name__ == "__main__":
    main()
