"""What installed distributions say of flags that the core does not have, such as those of another framework.

A distribution declares a function, which is called only when a command line or a file holds a name that is no
setting::

    [project.entry-points."slime.flag_advice"]
    compat = "slime_compat.flags:advice"

The function takes nothing and returns flag -> message, such as ``{"--use-tis": "--use-tis is called here --corrections
tis"}``. Where two distributions speak of one flag, the first by name is heard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import importlib_metadata as metadata

from slime_core.errors import ConfigError

__all__ = ["ADVICE_GROUP", "flag_advice"]

ADVICE_GROUP = "slime.flag_advice"

_BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, metadata.PackageNotFoundError)
"""What metadata raises that is cut short or none at all; ``slime plugins list`` names such a distribution."""


@cache
def flag_advice() -> Mapping[str, str]:
    """Flag with its dashes -> the message for somebody who writes it.

    Raises:
        ConfigError: a function cannot be imported or returned something else.
    """
    found: dict[str, str] = {}
    for point in sorted(_declared(), key=lambda one: (one.name, one.value)):
        for flag, message in _said(point).items():
            found.setdefault(flag, message)
    return found


def _declared() -> Iterator[metadata.EntryPoint]:
    for distribution in metadata.distributions():
        try:
            yield from (point for point in distribution.entry_points if point.group == ADVICE_GROUP)
        except _BROKEN:
            continue


def _said(point: metadata.EntryPoint) -> Mapping[str, str]:
    try:
        said: object = point.load()()
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as mistake:
        raise ConfigError(f"{_who(point)} failed with {type(mistake).__name__}: {mistake}. {_NEXT}") from mistake
    if not isinstance(said, Mapping) or not all(isinstance(text, str) for pair in said.items() for text in pair):
        raise ConfigError(f"{_who(point)} returned {said!r:.80}; accepted: texts by flag. {_NEXT}")
    return dict(said)


_NEXT = "Report it to the author of that distribution, or uninstall it."


def _who(point: metadata.EntryPoint) -> str:
    return f"entry point {point.name} = {point.value} of {ADVICE_GROUP}"
