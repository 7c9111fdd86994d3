"""Writes the problems of this example: ``train.jsonl`` and ``held_out.jsonl``, always the same.

    python examples/smollm2/data.py FOLDER

Sums of two numbers from 1 to 30 and products of two numbers from 2 to 12. The split is by unordered pairs, with a fifth
of each kind held out: neither a held-out problem nor its mirror image is ever trained on. Differences are left out: the
start model gets one in seven right, which is too few for a short run.

A prompt is a conversation of three messages and the question. Its answered question shows the form ``6 + 7 = 13``,
which SmolLM2 then copies; without it, SmolLM2 chats.
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
"""One pair in so many is held out."""

ADDENDS = range(1, 31)
FACTORS = range(2, 13)
NUM_HELD_OUT = {"sum": 176, "product": 24}
"""Kind -> number of held-out problems in the file."""

BEFORE = (
    {"role": "system", "content": "You are a calculator."},
    {"role": "user", "content": "6 + 7 ="},
    {"role": "assistant", "content": "6 + 7 = 13"},
)
SHOWN = (6, 7)
"""The sum that every prompt shows; it is in neither file."""


class Problem(NamedTuple):
    """One question: ``Problem("sum", "14 + 13", 27)``."""

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
    """Convert the problem to a line of a prompt file."""
    question = {"role": "user", "content": f"{problem.question} ="}
    return {"prompt": [*BEFORE, question], "label": str(problem.answer), "metadata": {"kind": problem.kind}}


def split() -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the held-out problems, each shuffled."""
    order = random.Random(SEED)
    train, held_out = [], []
    for kind, numbers in (("sum", ADDENDS), ("product", FACTORS)):
        pairs = [pair for pair in combinations_with_replacement(numbers, 2) if (kind, pair) != ("sum", SHOWN)]
        order.shuffle(pairs)
        cut = len(pairs) // HELD_OUT
        held_out += [problem for pair in pairs[:cut] for problem in problems_of(kind, *pair)]
        train += [problem for pair in pairs[cut:] for problem in problems_of(kind, *pair)]
    order.shuffle(train)
    order.shuffle(held_out)
    return train, [problem for kind, count in NUM_HELD_OUT.items() for problem in of_kind(held_out, kind)[:count]]


def of_kind(problems: list[Problem], kind: str) -> list[Problem]:
    """Return the problems of one kind, in order."""
    return [problem for problem in problems if problem.kind == kind]


def problems_of(kind: str, first: int, second: int) -> Iterator[Problem]:
    """Yield both orders of a pair; one, if its numbers are equal."""
    for a, b in sorted({(first, second), (second, first)}):
        yield Problem(kind, f"{a} + {b}", a + b) if kind == "sum" else Problem(kind, f"{a} * {b}", a * b)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
