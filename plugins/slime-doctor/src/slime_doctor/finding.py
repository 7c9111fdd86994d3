"""The finding of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``slime doctor``.

    Example: ``Finding("shared memory", "warn", "64 MiB of 64 MiB free", "docker run --shm-size 16g")``.

    Arguments:
        check: name of the check.
        level: ``fail``: a run does not work, or not as the machine is meant to be used; ``warn``: some runs do not.
        text: result of the check.
        next_step: advice to the user; may be empty.
    """

    check: str
    level: Level
    text: str
    next_step: str = ""

    def __str__(self) -> str:
        next_step = f". Next: {self.next_step}" if self.next_step else ""
        return f"{self.level:<5} {self.check:<16} {self.text}{next_step}"
