"""``rm_type``: the name of one reward model, or a weighted sum of several, such as ``0.7*math + 0.3*dapo:acc``."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["RewardTerm", "reward_names", "reward_terms"]

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


def reward_names(written: str) -> tuple[str, ...]:
    """The reward models that ``rm_type`` names, each once; of what cannot be read, ``written`` itself."""
    try:
        terms = reward_terms(written)
    except ValueError:
        terms = None
    return (written,) if terms is None else tuple(dict.fromkeys(term.name for term in terms))
