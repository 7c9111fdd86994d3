"""The reward of this example: 1 if the last number of the response is the label, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime_core import Registration, Sample, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the reward of ``--rm-type last_number``."""
    add.reward_model("last_number", score)


async def score(samples: Sequence[Sample]) -> list[float]:
    """Return 1.0 for each sample whose last number is the label, else 0.0.

    With label ``27``: 1.0 for ``13 + 14 = 27`` and ``The sum is 27.``, 0.0 for ``27 is 13 + 14``.
    """
    return [float(last_number(sample.response) == sample.label) for sample in samples]


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, without thousands separators, or None if it has none."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None
