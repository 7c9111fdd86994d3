"""Results of ``slime plugins check``, one line each, and their transfer from the examining process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Report", "Status", "Verdict", "fails", "ok", "skipped", "warns"]

Status = Literal["ok", "skipped", "warning", "FAILED"]
Report = Callable[["Verdict"], None]
"""Called with each verdict, as soon as the check ends."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check.

    Example: ``Verdict("files", "FAILED", "slime_grpo/losses.py is not what was installed")``.

    Arguments:
        check: name of the check.
        status: ``skipped``: not checked, and this is not a problem; ``warning``: correct, with a reservation.
        reason: explanation; may be empty if the status is ok.
    """

    check: str
    status: Status = "ok"
    reason: str = ""

    def as_row(self) -> dict[str, str]:
        """Return the verdict as JSON-ready values; ``Verdict(**row)`` is the inverse."""
        return asdict(self)


def ok(check: str, reason: str = "") -> Verdict:
    """Return the verdict of a check that passed."""
    return Verdict(check, "ok", reason)


def skipped(check: str, reason: str) -> Verdict:
    """Return the verdict of a check that was not run."""
    return Verdict(check, "skipped", reason)


def warns(check: str, reason: str) -> Verdict:
    """Return the verdict of a check that passed with a reservation."""
    return Verdict(check, "warning", reason)


def fails(check: str, reason: str) -> Verdict:
    """Return the verdict of a check that failed."""
    return Verdict(check, "FAILED", reason)
