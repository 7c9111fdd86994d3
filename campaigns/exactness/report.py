"""Tables of the matrix, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from campaigns.exactness.mutants import Mutant
from campaigns.exactness.outcome import BOUNDS, Difference

__all__ = ["print_matrix", "print_mutants", "print_rows"]

HEADS = {
    "loss": "loss",
    "metric": "worst metric",
    "grad_norm": "gradient norm",
    "gradient": "worst gradient",
    "change": "worst change of a step",
}


def print_matrix(rows: Sequence[Difference]) -> None:
    """One line a layout: the worst over its cases; what is broken stands out."""
    print(f"| layout | cases | {' | '.join(HEADS.values())} |")
    print("|---" * (len(HEADS) + 2) + "|")
    for layout in dict.fromkeys(row.layout for row in rows):
        of_layout = [row for row in rows if row.layout == layout and row.case != "trained"]
        if any(row.failure for row in of_layout):
            print(f"| {layout} | {len(of_layout)} | **failed** |" + " |" * (len(HEADS) - 1))
        elif of_layout:
            worst = [max(getattr(row, name) for row in of_layout) for name in HEADS]
            print(f"| {layout} | {len(of_layout)} | {' | '.join(f'{value:.1e}' for value in worst)} |")


def print_rows(rows: Sequence[Difference]) -> None:
    """One line a layout and case."""
    print(f"| layout | case | {' | '.join(HEADS.values())} | difference of ranks | seconds |")
    print("|---" * (len(HEADS) + 4) + "|")
    for row in rows:
        values = " | ".join(f"{getattr(row, name):.1e}{_place(row, name)}" for name in HEADS)
        end = row.failure or f"{values} | {row.ranks:.1e} | {row.seconds:.1f}"
        print(f"| {row.layout} | {row.case} | {end} |")


def _place(row: Difference, quantity: str) -> str:
    where = row.where.get(quantity)
    return f" ({where})" if where else ""


def print_mutants(mutants: Sequence[Mutant], rows: Sequence[Difference]) -> None:
    """What noticed each of them, and how large it was."""
    print("| mutant | caught in | by |")
    print("|---|---|---|")
    for mutant, row in zip(mutants, rows, strict=True):
        print(f"| {mutant.name} | {row.layout}, {row.case} | {_caught(row)} |")


def _caught(row: Difference) -> str:
    if not row.is_noticed:
        return f"**nothing** {row.failure}"
    if row.failure:
        return f"the learner refuses: {row.failure.partition(': ')[2]}"
    return ", ".join(f"{HEADS.get(name, name)} {getattr(row, name):.1e}" for name in BOUNDS if name in row.broken)
