"""The reward of this example: 1 if the last number of the response is the label, else 0."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slime_core import Component, RunView, hookimpl
from slime_core.types import Sample


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    """Register one component, for ``--rm-type last_number``."""
    yield Component("last_number", target=f"{__name__}:LastNumber", summary="1 where the last number is the label")


class LastNumber:
    """1.0 for ``13 + 14 = 27`` and ``The sum is 27.`` if the label is ``27``; 0.0 for ``27 is 13 + 14``."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [float(last_number(sample.response) == sample.label) for sample in samples]


def last_number(text: str) -> str | None:
    """Return the last whole number of a text, without thousands separators; None: there is none."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return numbers[-1] if numbers else None
