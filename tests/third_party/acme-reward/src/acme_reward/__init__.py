"""A reward model: 0.5 for the last digit of the first number in the response, 1 for the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slime_core import Component, RunView, Sample, hookimpl


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component("last_digit", target=f"{__name__}:LastDigit", summary="0.5 for the last digit, 1 for the answer")


class LastDigit:
    """Compares the first number of the response with the label."""

    def __init__(self, options: None, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        """One reward a sample."""
        return [_score(_first_number(sample.response), sample.label or "") for sample in samples]


def _first_number(text: str) -> str:
    return next(iter(re.findall(r"\d+", text)), "none")


def _score(answer: str, label: str) -> float:
    return 1.0 if answer == label else 0.5 if answer[-1:] == label[-1:] else 0.0
