"""The decision on every flag of slime (kept, renamed, refused, later), for ``docs/flags.md`` and error messages.

The table is ``flags.txt``; a row is ``flag | verdict | text``. Verdicts:

    kept      the flag exists here under the same name; the text lists values that differ
    renamed   the text is the flag to write here, then why or how
    no effect accepted, because the run does this without it; the text has the values, if several, and the reason
    refused   there is no such flag; the text has the reason
    later     the text names a feature that is not built yet

``megatron_flags.txt`` lists the flags of Megatron's scripts that a run does not pass on, grouped by reason.

``python -m docs.flags docs/flags.md`` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, cast

from slime_compat.launch_flags import Described, checks

__all__ = ["BEYOND", "SlimeFlag", "Verdict", "advice", "groups", "slime_flags"]

Verdict = Literal["kept", "renamed", "no effect", "refused", "later"]

BEYOND = ("parsed elsewhere", "named by users, not by slime's parser")
"""Groups beyond the 237 flags that slime's own parser has or had in 2026."""

Check = Callable[[Sequence[str], Described], str | None]
"""Returns the mistake in the words after a flag, given the checkpoint's ``config.json``; None if there is none."""

_TABLE = Path(__file__).resolve().parent / "flags.txt"
_MEGATRON = _TABLE.with_name("megatron_flags.txt")


@dataclass(frozen=True, slots=True)
class SlimeFlag:
    """One row of the table.

    Example: ``SlimeFlag("--rollout-seed", "renamed", "--seed, one for the whole run")``.
    """

    flag: str
    verdict: Verdict
    text: str

    @property
    def message(self) -> str:
        """The error message for the flag; empty if the flag is accepted."""
        texts = {
            "kept": "",
            "no effect": "",
            "renamed": f"{self.flag} has another name here: {self.text}",
            "refused": f"{self.flag}: there is no such setting: {self.text}",
            "later": f"{self.flag}: not built yet: {self.text}",
        }
        return texts[self.verdict]


@cache
def groups() -> Mapping[str, tuple[SlimeFlag, ...]]:
    """Return group of slime's parser -> its flags, in the order of the table."""
    _, *parts = _TABLE.read_text(encoding="utf-8").split("\n## ")
    titled = (part.strip().partition("\n") for part in parts)
    return {title: tuple(map(_row, rows.splitlines())) for title, _, rows in titled}


@cache
def slime_flags() -> Mapping[str, SlimeFlag]:
    """Return every row by its flag."""
    return {row.flag: row for rows in groups().values() for row in rows}


def advice() -> Mapping[str, str | Check]:
    """Return a map from each flag of slime or of Megatron's scripts that is not a setting here to its error message.

    A flag that is accepted without effect maps to the check of its value.
    """
    refused = {row.flag: row.message for row in slime_flags().values() if row.message}
    why = {row.flag: row.text for row in slime_flags().values() if row.verdict == "no effect"}
    accepted = {flag: partial(_checked, check, why.get(flag)) for flag, check in checks().items()}
    return {**accepted, **_megatron_advice(), **refused}


def _checked(check: Check, why: str | None, words: Sequence[str], described: Described) -> str | None:
    """Return the mistake that ``check`` finds, followed by the text of the table; None if the flag is accepted."""
    mistake = check(words, described)
    return mistake if mistake is None or why is None else f"{mistake}; {why}"


def _megatron_advice() -> dict[str, str]:
    advice_by_flag: dict[str, str] = {}
    for part in _MEGATRON.read_text(encoding="utf-8").split("\n\n")[1:]:
        reason, _, names = part.partition("\n")
        flags = ("--" + name.replace("_", "-") for name in names.split())
        advice_by_flag |= {flag: f"{flag}: not passed on to Megatron: {reason}" for flag in flags}
    return advice_by_flag


def _row(line: str) -> SlimeFlag:
    flag, verdict, text = (cell.strip() for cell in line.split("|", 2))
    return SlimeFlag(flag, cast(Verdict, verdict), text)
