"""Mistakes in settings, collected so that a user sees all of them in one error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slime_core.errors import ConfigError

__all__ = ["Mistake", "nearest", "report"]

LETTERS = 4
"""With fewer, a beginning says little."""

_NEXT_STEP = "slime config explain KEY says what a setting does and accepts."


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong.

    Arguments:
        message: where it stands, what was found, what would be accepted.
        key: the setting that has no usable value because of it, so that rules which read it stay silent; empty: none.
        ending: the end of the message, where finding it takes long. A command reads its line several times, each time
            with the settings of more plugins, and reports the mistakes of the last time only.
    """

    message: str
    key: str = ""
    ending: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self.message if self.ending is None else self.message + self.ending()


def report(mistakes: Sequence[Mistake]) -> ConfigError:
    """One error that lists all of them, each once, and says where to read more."""
    messages = list(dict.fromkeys(map(str, mistakes)))
    count = "1 mistake" if len(messages) == 1 else f"{len(messages)} mistakes"
    listed = "\n".join(f"  - {message}".replace("\n", "\n    ") for message in messages)
    return ConfigError(f"{count} in the settings:\n{listed}\n{_NEXT_STEP}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` of the only one of ``known`` that starts with ``name``, or a close one; else nothing."""
    known = list(known)
    completions = [one for one in known if len(name) >= LETTERS and one.startswith(name)]
    close = completions if len(completions) == 1 else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
