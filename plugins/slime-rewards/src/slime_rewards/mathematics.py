"""Rewards for mathematical answers, compared as expressions in any form. ``math-verify`` parses and compares.

``math``        the answer anywhere in the response; a boxed answer has priority
``deepscaler``  the boxed answer after the thinking, as in DeepScaleR
``dapo``        the answer on the line ``Answer: ...``, scored 1 or -1 (DAPO, 2503.14476, section 2.4)

Left out: the string normalisations of these projects; only mathematical equality matters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from slime_core import RunView
from slime_core.types import Sample, label_text
from slime_rewards.answers import after_thinking, answer_line, last_boxed

__all__ = ["BoxedMathematics", "Dapo", "DeepScaleR", "Mathematics", "equal"]

_MARKS = ("$", r"\(", r"\[", r"\boxed")
"""Starts of an expression in a text; an answer without any of them is one expression."""


def equal(label: str, answer: str) -> bool:
    r"""Return whether two answers are equal, such as ``0.5`` and ``\frac{1}{2}``; False if one cannot be parsed.

    Arguments:
        label: an expression, or text with an expression between dollar signs.
        answer: text with one or more expressions; a boxed one has priority.
    """
    verify = _math_verify()
    expected, found = verify.read(label if "$" in label or "\\boxed" in label else f"${label}$"), verify.read(answer)
    return bool(expected and found and verify.equal(expected, found))


class Mathematics:
    """1.0 if the response's answer equals the label as a mathematical expression, else 0.0."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [float(equal(label_text(sample, "math"), sample.response)) for sample in samples]


class BoxedMathematics:
    r"""Like :class:`Mathematics`, on the content of the last ``\boxed{}``; 0.0 without one."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [float(_boxed_equals(label_text(sample, "boxed_math"), sample.response)) for sample in samples]


class DeepScaleR:
    """1.0 if the thinking has ended and the boxed answer after it equals the label, else 0.0.

    The thinking ends with ``</think>``, or, in responses without it, with ``###Response``.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [
            float(_boxed_equals(label_text(sample, "deepscaler"), _answered(sample.response))) for sample in samples
        ]


class Dapo:
    """``score``: 1.0 if the last line ``Answer: ...`` equals the label, else -1.0; ``acc``: 1.0 or 0.0.

    Train on one of the two with ``--reward-key score``.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        """Return two named numbers per sample, in order."""
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> dict[str, float]:
        answer = answer_line(sample.response)
        right = answer is not None and equal(label_text(sample, "dapo"), _as_expression(answer))
        return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _as_expression(answer: str) -> str:
    return answer if any(mark in answer for mark in _MARKS) else f"${answer}$"


def _answered(response: str) -> str:
    answer = after_thinking(response)
    return response.partition("###Response")[2] if answer is None else answer


def _boxed_equals(label: str, text: str) -> bool:
    answer = last_boxed(text)
    return answer is not None and equal(label, f"${answer}$")


class _MathVerify:
    """The library, imported and configured once: its import takes a second."""

    def __init__(self) -> None:
        import math_verify

        # Its own time limits use signals, which work only in a main thread; the reward's process has a limit anyway.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library: Any = math_verify
        self._kinds = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]

    def read(self, text: str) -> list[Any]:
        """Return the candidate answers in ``text``."""
        found: list[Any] = self._library.parse(text, extraction_config=self._kinds, parsing_timeout=None)
        return found

    def equal(self, expected: list[Any], found: list[Any]) -> bool:
        return bool(self._library.verify(expected, found, timeout_seconds=None))


@cache
def _math_verify() -> _MathVerify:
    return _MathVerify()
