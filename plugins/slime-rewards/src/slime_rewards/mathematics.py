"""Rewards for mathematical answers, compared as expressions in any form. ``math-verify`` parses and compares.

``math``        the answer anywhere in the response; a boxed answer has priority
``deepscaler``  the boxed answer after the thinking, as in DeepScaleR
``dapo``        the answer on the line ``Answer: ...``, scored 1 or -1 (DAPO, 2503.14476, section 2.4)

Left out: the string normalisations of these projects; only mathematical equality matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slime_core.types import Sample, label_text, needs_text_label
from slime_rewards.answers import after_thinking, answer_line, final_answers, last_boxed, stated
from slime_rewards.expressions import read, same
from slime_rewards.notation import is_text, words

__all__ = ["BoxedMathematics", "Dapo", "DeepScaleR", "Mathematics", "equal"]

_SOLUTION_MARK = re.compile(r"^[^\S\n]*####", re.MULTILINE)


def labelled_answer(label: str) -> str:
    """Return the answer in a label: the text after the last ``####`` of a worked solution (GSM8K), else the label."""
    return _SOLUTION_MARK.split(label)[-1].strip()


def equal(label: str, answer: str) -> bool:
    r"""Return whether two answers are equal, such as ``0.5`` and ``\frac{1}{2}``, or ``\text{yes}`` and ``Yes``.

    Each is one expression or some words; False if one of them is not read to its end and their words differ.
    """
    label = labelled_answer(label)
    expected = words(label)
    if not expected or expected == words(answer):
        return bool(expected)
    if is_text(label) or is_text(answer):
        return expected.lower() == words(answer).lower()
    readings = read(answer)
    return any(same(expression, other) for expression in read(label) for other in readings)


class Mathematics:
    """1.0 if the response's answer equals the label as a mathematical expression, else 0.0."""

    check_row = staticmethod(needs_text_label)

    @staticmethod
    def perfect_response(label: str) -> str:
        """See :class:`~slime_core.CheckedRewardModel`."""
        return rf"\boxed{{{labelled_answer(label)}}}"

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [float(_states(label_text(sample, "math"), final_answers(sample.response))) for sample in samples]


class BoxedMathematics:
    r"""As ``math``, on the content of the last ``\boxed{}``; 0.0 without one."""

    check_row = staticmethod(needs_text_label)

    @staticmethod
    def perfect_response(label: str) -> str:
        """See :class:`~slime_core.CheckedRewardModel`."""
        return rf"\boxed{{{labelled_answer(label)}}}"

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [float(_boxed_equals(label_text(sample, "boxed_math"), sample.response)) for sample in samples]


class DeepScaleR:
    """1.0 if the boxed answer after the thinking equals the label, else 0.0, as in DeepScaleR.

    The thinking ends with ``</think>``, or, in responses without it, with ``###Response``; without either there is no
    answer.
    """

    check_row = staticmethod(needs_text_label)

    @staticmethod
    def perfect_response(label: str) -> str:
        """See :class:`~slime_core.CheckedRewardModel`."""
        return rf"</think>\boxed{{{labelled_answer(label)}}}"

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [
            float(_boxed_equals(label_text(sample, "deepscaler"), _answered(sample.response))) for sample in samples
        ]


class Dapo:
    """``score`` 1 or -1, ``acc`` 1 or 0, by the line ``Answer: ...`` (DAPO, 2503.14476); needs ``--reward-key``."""

    check_row = staticmethod(needs_text_label)

    @staticmethod
    def perfect_response(label: str) -> str:
        """See :class:`~slime_core.CheckedRewardModel`."""
        return f"Answer: {labelled_answer(label)}"

    async def score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        """Return two named numbers per sample, in order."""
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> dict[str, float]:
        label, answer = label_text(sample, "dapo"), answer_line(sample.response)
        right = answer is not None and _states(label, ([text] for text in stated(answer)))
        return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _states(label: str, answers: Iterable[list[str]]) -> bool:
    """Return whether the first answer that can be read equals the label; an answer may have several readings."""
    for readings in answers:
        if any(equal(label, text) for text in readings):
            return True
        if any(not is_text(text) and read(text) for text in readings):
            return False
    return False


def _answered(response: str) -> str:
    answer = after_thinking(response)
    return response.partition("###Response")[2] if answer is None else answer


def _boxed_equals(label: str, text: str) -> bool:
    answer = last_boxed(text)
    return answer is not None and equal(label, answer)
