"""One line of what ``slime plugins check`` found, and how it crosses from the process that looked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Report", "Status", "Verdict", "fails", "ok", "skipped", "warns"]

Status = Literal["ok", "skipped", "warning", "FAILED"]
Report = Callable[["Verdict"], None]
"""Takes each verdict as it is reached."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check.

    Example: ``Verdict("files", "FAILED", "slime_grpo/losses.py is not what was installed")``.

    Arguments:
        check: what was looked at.
        status: ``skipped``: it could not be looked at, and need not; ``warning``: sound, with a reservation.
        reason: in words; may be empty where it is ok.
    """

    check: str
    status: Status = "ok"
    reason: str = ""

    def as_row(self) -> dict[str, str]:
        """The verdict as JSON-ready values; ``Verdict(**row)`` reads it back."""
        return asdict(self)


def ok(check: str, reason: str = "") -> Verdict:
    """It is sound."""
    return Verdict(check, "ok", reason)


def skipped(check: str, reason: str) -> Verdict:
    """It was not looked at."""
    return Verdict(check, "skipped", reason)


def warns(check: str, reason: str) -> Verdict:
    """It works, and could be better."""
    return Verdict(check, "warning", reason)


def fails(check: str, reason: str) -> Verdict:
    """It is broken."""
    return Verdict(check, "FAILED", reason)
