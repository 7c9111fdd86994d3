"""The progress of an actor's call; without Ray, so that the code that counts needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an actor's call.

    Example: ``Progress(12, 32, "groups", {"engines": 40, "rewards": 3})`` prints as ``12 of 32 groups done, waiting for
    engines (40), rewards (3)``.

    Arguments:
        done, total: finished parts, and how many there will be.
        unit: name of the parts, in the plural.
        waiting_for: reason to wait -> number of unfinished parts.
    """

    done: int
    total: int
    unit: str
    waiting_for: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        waiting = ", ".join(f"{name} ({count})" for name, count in self.waiting_for.items() if count)
        return f"{self.done} of {self.total} {self.unit} done" + (f", waiting for {waiting}" if waiting else "")
