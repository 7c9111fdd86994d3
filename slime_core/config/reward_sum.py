"""``rm_type``: the name of one reward model, or a weighted sum of several, such as ``0.7*math + 0.3*dapo:acc``.

A file may give the sum as a table, which is read into the same text::

    [rollout.rm_type]
    math = 0.7
    "dapo:acc" = 0.3
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator

from slime_core.config.section import Name, rejected

__all__ = ["RewardSum", "RewardTerm", "reward_names", "reward_terms"]

_TERM = re.compile(r"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*\*\s*([A-Za-z0-9][A-Za-z0-9._+-]*?)(?::([^\s:*]+?))?\s*")
_BETWEEN = re.compile(r"(?<=[^\s+-])\s*(?=[+-]\s*[\d.]+\s*\*)")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One part of a sum.

    Example: ``0.3*dapo:acc`` is ``RewardTerm(0.3, "dapo", "acc")``.

    Arguments:
        weight: what the part's reward is multiplied with.
        name: of the reward model.
        key: which of its named numbers counts; None: its reward is a plain number.
    """

    weight: float
    name: str
    key: str | None = None

    def __str__(self) -> str:
        return self.name if self.key is None else f"{self.name}:{self.key}"


def reward_terms(written: str) -> tuple[RewardTerm, ...] | None:
    """The parts of a sum, in order; None: ``written`` is the name of one reward model.

    Raises:
        ValueError: it is neither; the message says what is accepted.
    """
    if "*" not in written:
        return None
    found = [_TERM.fullmatch(part) for part in _BETWEEN.split(written.strip())]
    terms = [RewardTerm(float(one[1] + one[2]), one[3], one[4]) for one in found if one]
    if len(terms) < len(found):
        raise ValueError(
            f"{written!r} is no sum of reward models; accepted is WEIGHT*NAME+WEIGHT*NAME, such as '0.7*math+0.3*f1', "
            "or WEIGHT*NAME:KEY for one of several numbers, such as '0.3*dapo:acc'"
        )
    if len({str(term) for term in terms}) < len(terms):
        raise ValueError(f"{written!r} names a part twice; add up its weights")
    return tuple(terms)


def _written(found: Any) -> Any:
    """A table of weights as the sum that it means; anything else as it is."""
    if not isinstance(found, Mapping):
        return found
    wrong = [f"{name} = {weight!r}" for name, weight in found.items() if not _is_weight(weight)]
    if wrong or not found:
        shown = ", ".join(wrong) or "an empty table"
        raise rejected(f"found {shown}; accepted: a table of reward models and their weights, such as math = 0.7")
    parts = [f"{Decimal(repr(weight)):+f}*{name}" for name, weight in found.items()]
    text = "".join(parts).removeprefix("+")
    try:
        read = reward_terms(text) or ()
    except ValueError:
        read = ()
    if [str(term) for term in read] != list(found):
        names = ", ".join(map(repr, found))
        raise rejected(f'found the parts {names}; accepted: NAME or "NAME:KEY", such as math = 0.7, "dapo:acc" = 0.3')
    return text


def _is_weight(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


RewardSum = Annotated[Name, BeforeValidator(_written)]
"""The text of ``rm_type``, which a file may write as a table."""


def reward_names(written: str) -> tuple[str, ...]:
    """The reward models that ``rm_type`` names, each once; of what cannot be read, ``written`` itself."""
    try:
        terms = reward_terms(written)
    except ValueError:
        terms = None
    return (written,) if terms is None else tuple(dict.fromkeys(term.name for term in terms))
