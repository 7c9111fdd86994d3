"""The reward of Search-R1: exact match of the final answer (2503.09516, section 3.4), and a part for the format.

Answers are compared as SQuAD compares them (1606.05250): lower case, without punctuation, without articles, with single
spaces. The reward is ``(1 - f) * exact_match + f * format`` with ``f = --searchr1.format-score``, the outcome reward
with a format part of 2505.15117, equation 2; ``f = 0`` is the reward of the first paper.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence

from slime_core import Sample
from slime_core.errors import DataError
from slime_core.types import JsonValue, needs_label
from slime_searchr1.options import SearchOptions
from slime_searchr1.protocol import is_well_formed

__all__ = ["AnswerMatch", "final_answer", "normalised"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerMatch:
    """Exact match of the last <answer>, and a part for the form of the response (Search-R1, 2503.09516)."""

    @staticmethod
    def check_row(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
        """See :class:`~slime_core.CheckedRewardModel`."""
        text = label if isinstance(label, str) else json.dumps(label)
        if (mistake := needs_label(label, metadata)) is not None:
            return mistake
        has_answer = any(map(str.strip, _accepted(text)))
        return None if has_answer else f"the label {text:.100} holds no answer to compare with"

    def __init__(self, options: SearchOptions) -> None:
        self._share = options.format_score

    @staticmethod
    def perfect_response(label: str) -> str:
        """See :class:`~slime_core.CheckedRewardModel`."""
        return f"<answer>{_accepted(label)[0]}</answer>"

    async def score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        """Return for each sample, in order:

        - ``exact_match``: 1 if the response's final answer equals one of the label's answers, both normalised, else 0.
        - ``format``: 1 if the response consists of searches, each with its information, and one final answer, else 0.
        - ``score``: the weighted sum of both.

        Raises:
            DataError: a sample has no label.
        """
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> dict[str, float]:
        accepted = {normalised(answer) for answer in _answers(sample)}
        answer = final_answer(sample.response)
        match = float(answer is not None and normalised(answer) in accepted)
        form = float(is_well_formed(sample.response))
        return {"score": (1 - self._share) * match + self._share * form, "exact_match": match, "format": form}


def final_answer(response: str) -> str | None:
    """Return the content of the last complete ``<answer>...</answer>``, stripped; None if there is none."""
    before, closing, _ = response.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if opening and closing else None


def normalised(answer: str) -> str:
    """Return the answer in lower case, without punctuation and the articles a, an, the, with single spaces.

    Example: ``normalised("The  Beatles!")`` is ``"beatles"``.
    """
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _answers(sample: Sample) -> list[str]:
    if sample.label is None:
        raise DataError(
            f"reward model 'search_r1': sample {sample.index} of group {sample.group_index} has no label to compare "
            "with.\n"
            "Name the label's field with --label-key, or choose another reward model."
        )
    return _accepted(sample.label)


def _accepted(label: str) -> list[str]:
    """Return the label's answers: ``ground_truth.target`` of an object, the format of the paper's rows under
    ``reward_model``; the entries of a list; or the label itself."""
    try:
        answers = json.loads(label)
    except (ValueError, RecursionError):
        return [label]
    if isinstance(answers, dict):
        truth = answers.get("ground_truth", answers)
        answers = truth.get("target", truth) if isinstance(truth, dict) else truth
        answers = [answers] if isinstance(answers, str | int | float) else answers
    return [str(answer) for answer in answers] if isinstance(answers, list) else [label]
