"""Writes the problems of this example: ``train.jsonl`` and ``held_out.jsonl``, always the same.

    python examples/smollm2/data.py FOLDER

A *fact* is an unordered pair of numbers. An addition fact {13, 14} is asked four ways (13 + 14, 14 + 13, 27 - 13,
27 - 14; two if both numbers are one), a multiplication fact {4, 7} two ways. The split goes by facts, a fifth of each
kind held out: no held-out problem, nor its mirror image, nor the difference that undoes it, is ever trained on.

A prompt is a conversation of three messages and the question. The answer given in it shows the form ``6 + 7 = 13``,
which SmolLM2 then keeps; without it, it chats.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple

SEED = 20
HELD_OUT = 5
"""One fact in so many is held out."""

ADDENDS = range(1, 31)
FACTORS = range(2, 13)
NUM_HELD_OUT = {"sum": 100, "difference": 100, "product": 24}
"""Held-out problems that are written, of each kind; more than these would only make the evaluation longer."""

BEFORE = (
    {"role": "system", "content": "You are a calculator."},
    {"role": "user", "content": "6 + 7 ="},
    {"role": "assistant", "content": "6 + 7 = 13"},
)
SHOWN = (6, 7)
"""The fact that every prompt shows; it is in neither file."""


class Problem(NamedTuple):
    """One question: ``Problem("difference", "27 - 13", 14)``."""

    kind: str
    question: str
    answer: int


def main(folder: Path) -> None:
    """Write both files to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in zip(("train", "held_out"), split(), strict=True):
        lines = [json.dumps(row(problem)) for problem in problems]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{folder / name}.jsonl: {len(lines)} problems")


def row(problem: Problem) -> dict[str, object]:
    """The problem as a line of a prompt file."""
    question = {"role": "user", "content": f"{problem.question} ="}
    return {"prompt": [*BEFORE, question], "label": str(problem.answer), "metadata": {"kind": problem.kind}}


def split() -> tuple[list[Problem], list[Problem]]:
    """All problems to train on, and those that are held out, each in an order of its own."""
    order = random.Random(SEED)
    train, held_out = [], []
    for ask, numbers in ((additions, ADDENDS), (products, FACTORS)):
        facts = [fact for fact in combinations_with_replacement(numbers, 2) if ask is products or fact != SHOWN]
        order.shuffle(facts)
        cut = len(facts) // HELD_OUT
        held_out += [problem for fact in facts[:cut] for problem in ask(*fact)]
        train += [problem for fact in facts[cut:] for problem in ask(*fact)]
    order.shuffle(train)
    order.shuffle(held_out)
    return train, [problem for kind, count in NUM_HELD_OUT.items() for problem in of_kind(held_out, kind)[:count]]


def of_kind(problems: list[Problem], kind: str) -> list[Problem]:
    """Those of one kind, in their order."""
    return [problem for problem in problems if problem.kind == kind]


def additions(first: int, second: int) -> Iterator[Problem]:
    """What an addition fact answers."""
    for a, b in sorted({(first, second), (second, first)}):
        yield Problem("sum", f"{a} + {b}", a + b)
        yield Problem("difference", f"{a + b} - {a}", b)


def products(first: int, second: int) -> Iterator[Problem]:
    """What a multiplication fact answers."""
    for a, b in sorted({(first, second), (second, first)}):
        yield Problem("product", f"{a} * {b}", a * b)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
