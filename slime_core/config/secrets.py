"""Secrets of a run: settings name the environment variable that holds one, and never hold it themselves.

What a setting says is written into the run folder, shown by ``slime check`` and handed to trackers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

__all__ = ["SECRET", "secret_names", "shown", "unset", "written_out"]

SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Where a text names the environment variable that stands there."""

_OF_SECRETS = re.compile(
    r"(?i)(?:.*[_.-])?(?:(?:api|access|secret|private)?[_-]?keys?|tokens?|secrets?|pass(?:word|wd|phrase)?|pwd"
    r"|auth(?:orization)?|credentials?|sig(?:nature)?|sas|jwt|bearer)"
)
"""Parameters of an address that hold secrets where services have them."""


def secret_names(text: str) -> list[str]:
    """The environment variables that ``text`` names, in order."""
    return SECRET.findall(text)


def shown(url: str) -> str:
    """``url`` for people: scheme, host, port and path alone.

    Raises:
        ValueError: it is no address.
    """
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def unset(*names: str) -> Iterator[str]:
    """Those of ``names`` that are not set in this process."""
    yield from (name for name in names if name not in os.environ)


def written_out(url: str) -> Iterator[str]:
    """What of ``url`` looks like a secret that is written out, in words that do not hold it.

    Example: of ``http://me:x@host/?token=y``, "a password" and "token".
    """
    parts = urlsplit(url)
    if parts.password and not SECRET.search(parts.password):
        yield "a password"
    elif parts.username and not parts.password and not SECRET.search(parts.username):
        yield "a user"
    for name, value in parse_qsl(parts.query):
        if _OF_SECRETS.fullmatch(name) and not SECRET.search(value):
            yield name
