"""What a reward model returns for one sample."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Reward", "RewardFailure"]

Reward = float | dict[str, float]
"""A finite number, or finite numbers by name."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a sample has no reward; a reward model may return it in place of one, so that its other samples keep theirs.

    Example: ``RewardFailure("timeout", "the judge gave no answer within 30 s")``.

    Arguments:
        cause: one word to count by (``rollout/failures/CAUSE``): ``timeout``, ``memory``, ``crash``, ``invalid``, or
            the name of an exception.
        error: the message for people.
        lost: set by the core: the reward process ended, or ran out of memory, so another call may have caused it.
        own: set by the core: no other call can have caused it, because the process worked on this call alone until its
            time limit.
    """

    cause: str
    error: str
    lost: bool = False
    own: bool = False
