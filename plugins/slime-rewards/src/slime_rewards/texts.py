"""Rewards for answers in words: word overlap and multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.types import Sample, label_text
from slime_rewards.answers import after_thinking, answer_line, last_boxed

__all__ = ["MultipleChoice", "WordOverlap", "choice", "word_f1"]

_ARTICLES = {"a", "an", "the"}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ENDS = r"(?=\s*(?:$|\n|[.,:;!?()\]}*–—])|\s+-)"
"""Lookahead after a letter that is not a word of a sentence: the end, a new line or punctuation, but no apostrophe
(``I'm``)."""

_SETTLED = re.compile(rf"\W*(?:([A-HJ]){_ENDS}.*|(?<=\()(I)\).*|([a-jI])\W*)", re.DOTALL)
"""A capital letter followed by ``_ENDS``, or a letter alone: ``A``, ``a`` and ``I`` are also words."""

_LETTER = rf"[B-HJ](?![A-Za-z])|A(?:{_ENDS}|(?=\s+(?:because|since|as)\b))|I(?=\)|[*.]*\s*$)|[a-j](?=[)*.,;]|\s*$)"
_STATED = re.compile(rf"(?i:answer|choice|option)(?i:\s+is)?[\s:]*\**\(?({_LETTER})")
_ALONE = re.compile(r"(?<![A-Za-z])\(?([A-J])\)?(?![A-Za-z])")


def word_f1(answer: str, label: str) -> float:
    """Return the harmonic mean of precision and recall over words, 0 to 1; 1 if both texts have no words.

    Case, punctuation and the articles a, an, the are ignored. Source: SQuAD (1606.05250), section 6.1.
    """
    given, expected = _words(answer), _words(label)
    if not given or not expected:
        return float(given == expected)
    common = sum((given & expected).values())
    return 2.0 * common / (given.total() + expected.total())


def choice(text: str) -> str | None:
    """Return the chosen letter: boxed, on the ``Answer:`` line, after "the answer is", or the last letter alone.

    None: no choice from A to J is found.
    """
    text = after_thinking(text) or text
    for part in (last_boxed(text), answer_line(text)):
        settled = _SETTLED.fullmatch(part or "")
        if settled:
            return settled[settled.lastindex or 0].upper()
    stated = _STATED.findall(text)
    if stated:
        return str(stated[-1]).upper()
    alone = [letter for letter in _ALONE.findall(text) if letter != "I"]
    return str(alone[-1]) if alone else None


class WordOverlap:
    """F1 of the response's words against the label's; see :func:`word_f1`."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [word_f1(sample.response, label_text(sample, "f1")) for sample in samples]


class MultipleChoice:
    """1.0 if the response chooses the label's letter, as in GPQA (2311.12022), else 0.0."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label, or the label is not a letter.
        """
        return [float(choice(sample.response) == _right_choice(sample)) for sample in samples]


def _right_choice(sample: Sample) -> str:
    label = label_text(sample, "gpqa")
    found = re.fullmatch(r"\W*([A-Ja-j])\W*", label)
    if found is None:
        raise DataError(
            f"reward model 'gpqa': sample {sample.index} of group {sample.group_index} has the label {label!r:.100}; "
            "accepted: the letter of the right choice, from A to J.\nName its field with --label-key."
        )
    return found[1].upper()


def _words(text: str) -> Counter[str]:
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return Counter(word for word in words if word not in _ARTICLES)
