"""Sums of two numbers from 0 to 99 in usual notation: the problems, their split, and the files of them.

The prompt is ``37+45``, the answer ``82``; operands have no leading zeros, so a prompt has 3 to 5 characters. Each
problem has a number of *carries*, 0 to 2: columns that add up to ten or more, including a carry into them. Accuracy by
carries and by operand length distinguishes adding from knowing the format: a model that drops carries is right exactly
if there are none.

The 10,000 problems have a fixed split: 9,000 to train on, 500 held out for evaluation during runs, 500 in reserve for
final checks. A sum and its mirror image, ``37+45`` and ``45+37``, are always in the same part, so that no held-out
answer can be read off a training row. No training file and no warm-up contains a problem of the last two parts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from examples import tiny_model
from examples.tiny_model import SPECIAL_TOKENS

__all__ = [
    "CONTEXT_LENGTH",
    "VOCABULARY",
    "Problem",
    "Split",
    "all_problems",
    "data_files",
    "split",
    "tokenizer_files",
]

OPERAND_LIMIT = 100
CONTEXT_LENGTH = 128
SPLIT_SEED = 20
PAIRS_HELD_OUT = {
    ("1+1", 0): 5,
    ("1+1", 1): 5,
    ("1+2", 0): 24,
    ("1+2", 1): 18,
    ("1+2", 2): 4,
    ("2+2", 0): 48,
    ("2+2", 1): 89,
    ("2+2", 2): 57,
}
"""(Digits, carries) -> number of mirrored pairs held out, and as many again in reserve: 250 pairs are 500 problems.
About a twentieth of each stratum, and more of the two smallest, which would otherwise have five problems."""

VOCABULARY = (*SPECIAL_TOKENS, *"0123456789", "+")
"""Sixteen tokens, in the order of their ids; the model can sample no other id."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One sum.

    Example: ``Problem(37, 45)`` has the prompt ``"37+45"``, the answer ``"82"``, the digits ``"2+2"`` and one carry.

    Arguments:
        left, right: the operands, 0 to 99.
    """

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The sum as text, without leading zeros."""
        return f"{self.left}+{self.right}"

    @property
    def answer(self) -> str:
        """The right answer as text."""
        return str(self.left + self.right)

    @property
    def digits(self) -> str:
        """The lengths of the operands, such as ``"1+2"``."""
        return f"{len(str(self.left))}+{len(str(self.right))}"

    @property
    def carries(self) -> int:
        """Number of columns, of the two, with a carry out: 0 to 2."""
        from_units = self.left % 10 + self.right % 10 >= 10
        from_tens = self.left // 10 + self.right // 10 + from_units >= 10
        return from_units + from_tens

    @property
    def answer_without_carries(self) -> str:
        """The answer with every column added separately and every carry dropped: 37+45 is ``"72"``."""
        units = (self.left + self.right) % 10
        tens = (self.left // 10 + self.right // 10) % 10
        return str(10 * tens + units)

    def row(self) -> dict[str, object]:
        """Return the data row: prompt, label, and the metadata by which accuracy is reported."""
        return {
            "prompt": self.prompt,
            "label": self.answer,
            "metadata": {"digits": self.digits, "carries": self.carries},
        }


@dataclass(frozen=True, slots=True)
class Split:
    """Three disjoint, shuffled lists with 9,000, 500 and 500 problems; together they contain every problem once."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    reserve: tuple[Problem, ...]


def all_problems() -> list[Problem]:
    """Return every problem once, ordered by the left operand, then by the right one."""
    return [Problem(left, right) for left in range(OPERAND_LIMIT) for right in range(OPERAND_LIMIT)]


def split() -> Split:
    """Return the split of the task, the same everywhere.

    The hundred doubles such as ``7+7`` have no mirror image; all of them are in the training part.
    """
    rng = random.Random(SPLIT_SEED)
    held_out: list[Problem] = []
    reserve: list[Problem] = []
    train = [problem for problem in all_problems() if problem.left == problem.right]
    for stratum, pairs in sorted(_mirrored_pairs().items()):
        share = PAIRS_HELD_OUT[stratum]
        rng.shuffle(pairs)
        held_out += chain.from_iterable(pairs[:share])
        reserve += chain.from_iterable(pairs[share : 2 * share])
        train += chain.from_iterable(pairs[2 * share :])
    for part in (train, held_out, reserve):
        rng.shuffle(part)
    return Split(train=tuple(train), held_out=tuple(held_out), reserve=tuple(reserve))


def _mirrored_pairs() -> dict[tuple[str, int], list[tuple[Problem, Problem]]]:
    strata: dict[tuple[str, int], list[tuple[Problem, Problem]]] = {}
    for problem in all_problems():
        if problem.left < problem.right:
            mirrored = Problem(problem.right, problem.left)
            strata.setdefault((problem.digits, problem.carries), []).append((problem, mirrored))
    return strata


def data_files() -> dict[str, str]:
    """Return name -> content of the data files: JSON lines of :meth:`Problem.row`."""
    parts = split()
    return {
        "train.jsonl": _lines(parts.train),
        "held_out.jsonl": _lines(parts.held_out),
        "reserve.jsonl": _lines(parts.reserve),
    }


def _lines(problems: Iterable[Problem]) -> str:
    return "".join(json.dumps(problem.row()) + "\n" for problem in problems)


def tokenizer_files() -> dict[str, str]:
    """Return name -> content of the tokenizer's files: one token a character."""
    return tiny_model.tokenizer_files(VOCABULARY, pattern=".", context_length=CONTEXT_LENGTH)
