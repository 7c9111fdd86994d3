"""The outcome reward of Search-R1 (2503.09516, section 3.4): exact match of the final answer.

Answers are compared as SQuAD compares them (1606.05250): lower case, without punctuation, without articles, with single
spaces. Left out: the format rewards of later work.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence

from slime_core import RunView, Sample
from slime_core.errors import DataError

__all__ = ["AnswerMatch", "final_answer", "normalised"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerMatch:
    """1.0 where the response's final answer equals one of the label's answers, both normalised; else 0.0."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """One reward a sample, in order; a response without an answer gets 0.0.

        Raises:
            DataError: a sample has no label.
        """
        return [_score(sample) for sample in samples]


def final_answer(response: str) -> str | None:
    """What stands in the last complete ``<answer>...</answer>``, stripped; None where there is none."""
    before, closing, _ = response.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if opening and closing else None


def normalised(answer: str) -> str:
    """Lower case, without punctuation and the articles a, an, the; single spaces.

    Example: ``normalised("The  Beatles!")`` is ``"beatles"``.
    """
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _score(sample: Sample) -> float:
    accepted = {normalised(answer) for answer in _answers(sample)}
    answer = final_answer(sample.response)
    return float(answer is not None and normalised(answer) in accepted)


def _answers(sample: Sample) -> list[str]:
    """The label's answers: the entries of a JSON list of strings or numbers, or else the label itself."""
    if sample.label is None:
        raise DataError(
            f"reward model 'search_r1': sample {sample.index} of group {sample.group_index} has no label to compare "
            "with.\n"
            "Name the label's field with --label-key, or choose another reward model."
        )
    try:
        found = json.loads(sample.label)
    except ValueError:
        return [sample.label]
    return [str(entry) for entry in found] if isinstance(found, list) else [sample.label]
