"""Rewards for answers in words: word overlap and multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from slime_core.errors import DataError
from slime_core.types import JsonValue, Sample, label_text, needs_text_label
from slime_rewards.answers import after_thinking, answer_line, last_boxed

__all__ = ["MultipleChoice", "WordOverlap", "choice", "word_f1"]

_ARTICLES = {"a", "an", "the"}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ENDS = r"(?=\s*(?:$|\n|[.,:;!?()\]}*–—])|\s+-)"
"""Lookahead after a letter that is not a word of a sentence: the end, a new line or punctuation, but no apostrophe
(``I'm``)."""

_SETTLED = re.compile(rf"\W*(?:([A-HJ]){_ENDS}.*|(?<=\()(I)\).*|([a-j])(?:[.):]\s.*|\W*)|(I)\W*)", re.DOTALL)
"""A capital letter followed by ``_ENDS``, or a letter alone: ``A``, ``a`` and ``I`` are also words."""

_OPEN = r"[\s:*_`(\[\"'$\\]*+"
_LETTER = (
    rf"[B-HJ](?![A-Za-z]|'[a-z])|A(?:{_ENDS}|(?=['\"]|\s+(?:because|since|as|and|or|not|is|but|which)\b))"
    r"|I(?=\)|[*.]*\s*$)"
)
_NAMED = rf"(?:{_LETTER}|[a-j](?=[)*.,;]|\s*$))"
_SOFT = (
    r"(?i:(?:the|clearly|therefore|thus|definitely|most|likely|probably|actually|just|but|option|choice|answer|letter)"
    rf"\b{_OPEN}){{0,6}}+"
)
_LIST = (
    r"\(?[A-J]\)?(?![A-Za-z]|'[a-z])(?:\s?(?:,?\s?\b(?:or|nor|and)\b|,|/)\s?(?:option\s|choice\s)?\(?[A-J]\)?"
    r"(?=\s?(?:[,.;:)/]|$|or\b|nor\b|and\b|are\b|is\b))){0,9}+"
)
_NEGATED = re.compile(
    r"(?:\b(?i:not|rather\s+than|instead\s+of|other\s+than|except(?:\s+for)?|nor|unlike|without|against|over"
    r"|rul(?:e|es|ed|ing)\s+out|eliminat\w+|reject\w*|discard\w*|exclud\w+)|n't)"
    rf"\s(?:be\s)?{_OPEN}{_SOFT}{_LIST}"
    rf"|(?:(?i:options?|choices?|answers?)\s)?{_LIST}\s(?i:is|are|was|were|seems?|can|could|would|does|do)"
    r"(?:\s(?i:clearly|also|both|all|definitely|be|look|seem|therefore|obviously)){0,3}\s?"
    r"(?i:wrong|incorrect|false|invalid|not\b|n't|impossible|eliminated|excluded|ruled|tempting|unlikely|out\b)"
    rf"|{_LIST}\s(?i:cannot\b)"
)
"""Letters that a sentence rules out: ``not A``, ``rather than B or C``, ``A and B are wrong``."""

_STATED = re.compile(
    rf"(?i:answer(?:\s(?:is|was|would\sbe|must\sbe|should\sbe|has\sto\sbe|=))?"
    rf"|(?:choice|option)(?:\s(?:is|was|would\sbe|must\sbe|should\sbe|=)|:)){_OPEN}{_SOFT}({_NAMED})"
    r"|\b(?i:choose|pick|select|take|conclude|go(?:ing)?\swith|opt\sfor|correct\sone\sis|best\sis|it\sis|it's|must\sbe)"
    rf"\s{_OPEN}{_SOFT}({_NAMED})"
    r"|(?<![A-Za-z'])\(?([A-J])\)?\**\s(?i:is|seems|must\sbe)\s(?i:the\s)?(?i:only\s|clearly\s|definitely\s){0,2}"
    r"(?i:correct|right|best|true|answer)\b"
)
_MENTIONED = re.compile(rf"(?i:option|choice){_OPEN}({_NAMED})")
_STARTS = re.compile(r"^[^\w\n]*+(?:([A-HJa-j])[.):]|(?<=\()(I)\))(?:\W|$)", re.MULTILINE)
_ONLY = re.compile(r"[^\w]*+([A-Ja-j])\W*")
_ALONE = re.compile(rf"(?<![A-Za-z])\(?({_LETTER})")
_SENTENCES = re.compile(r"(?<=[.!?])[*\"')\]]{0,4}\s(?=[A-Z(*\\])|\n")
_COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|boxed)\s*(?=\{)|\\[()\[\]]|[{}$]")


def word_f1(answer: str, label: str) -> float:
    """Return the harmonic mean of precision and recall over words, 0 to 1; 1 if both texts have no words.

    Case, punctuation and the articles a, an, the are ignored. Source: SQuAD (1606.05250), section 6.1.
    """
    words, expected = _words(answer), _words(label)
    if not words or not expected:
        return float(words == expected)
    common = sum((words & expected).values())
    return 2.0 * common / (words.total() + expected.total())


def choice(text: str) -> str | None:
    """Return the chosen letter: boxed, on the ``Answer:`` line, or in the last sentence that states one.

    Letters that a sentence rules out are ignored, as in "C, not option A". If no sentence states a letter, the choice
    is the letter that the text starts with, as in ``b. 4``, the last "option B", or the last letter alone. None: no
    choice from A to J.
    """
    text = after_thinking(text) or text
    text = re.sub(r"[^\S\n]+", " ", text)
    only = _ONLY.fullmatch(text)
    if only and only[1] != "I":
        return only[1].upper()
    for part in (last_boxed(text), answer_line(text)):
        settled = _SETTLED.fullmatch(_COMMANDS.sub(" ", part or "").strip())
        if settled:
            return settled[settled.lastindex or 0].upper()
    sentences = [_NEGATED.sub(" ", sentence) for sentence in _SENTENCES.split(_COMMANDS.sub(" ", text))]
    starts = {letter.upper() for letter in _matches(_STARTS, text)}
    for letters in (
        [letter for sentence in sentences for letter in _matches(_STATED, sentence)],
        starts if len(starts) == 1 else (),
        [letter for sentence in sentences for letter in _matches(_MENTIONED, sentence)],
        [letter for sentence in sentences for letter in _ALONE.findall(sentence) if letter != "I"],
    ):
        for letter in reversed(list(letters)):
            return str(letter).upper()
    return None


def _matches(pattern: re.Pattern[str], sentence: str) -> list[str]:
    return [match[match.lastindex or 0] for match in pattern.finditer(sentence)]


class WordOverlap:
    """F1 of the response's words against the label's; see :func:`word_f1`."""

    check_row = staticmethod(needs_text_label)

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [word_f1(sample.response, label_text(sample, "f1")) for sample in samples]


class MultipleChoice:
    """1.0 if the response chooses the label's letter, else 0.0 (GPQA, 2311.12022)."""

    @staticmethod
    def check_row(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
        """See :class:`~slime_core.CheckedRewardModel`."""
        mistake = needs_text_label(label, metadata)
        return mistake or (None if _letter(str(label)) else f"the label is {label!r:.100}; {_ACCEPTED}")

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label, or the label is not a letter.
        """
        return [float(choice(sample.response) == _right_choice(sample)) for sample in samples]


def _right_choice(sample: Sample) -> str:
    label = label_text(sample, "gpqa")
    letter = _letter(label)
    if letter is None:
        where = f"sample {sample.index} of group {sample.group_index}"
        raise DataError(f"reward model 'gpqa': {where} has the label {label!r:.100}; {_ACCEPTED}")
    return letter


_ACCEPTED = "accepted: the letter of the right choice, from A to J.\nName its field with --label-key."


def _letter(label: str) -> str | None:
    match = re.fullmatch(r"\W*([A-Ja-j])\W*", label)
    return None if match is None else match[1].upper()


def _words(text: str) -> Counter[str]:
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return Counter(word for word in words if word not in _ARTICLES)
