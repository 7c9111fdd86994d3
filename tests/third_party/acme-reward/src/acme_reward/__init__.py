"""A reward model that is a function: 0.5 for the last digit of the first number in the response, 1 for the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime_core import Registration, Sample, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("last_digit", last_digit)


async def last_digit(samples: Sequence[Sample]) -> list[float]:
    """Compare the first number of the response with the label: 0.5 for the last digit, 1 for the answer."""
    return [_reward(_first_number(sample.response), sample.label or "") for sample in samples]


def _first_number(text: str) -> str:
    return next(iter(re.findall(r"\d+", text)), "none")


def _reward(answer: str, label: str) -> float:
    return 1.0 if answer == label else 0.5 if answer[-1:] == label[-1:] else 0.0
