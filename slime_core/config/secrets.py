"""Secrets of a run: settings name the environment variable that holds one, and never hold it themselves.

What a setting says is written into the run folder, shown by ``slime check`` and handed to trackers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel

from slime_core.types import JsonValue

__all__ = ["SECRET", "secret_names", "shown", "unset", "without_secret", "without_secrets", "written_out"]

SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Where a text names the environment variable that stands there."""

_OF_SECRETS = re.compile(
    r"(?i)(?:.*[_.-])?(?:(?:api|access|secret|private)?[_-]?keys?|tokens?|secrets?|pass(?:word|wd|phrase)?|pwd"
    r"|auth(?:orization)?|credentials?|sig(?:nature)?|sas|jwt|bearer)"
)
"""Parameters of an address that hold secrets where services have them."""

_OPTION_OF_SECRET = re.compile(
    r"(?i)(?:.*[_.-])?(?:(?:api|access|secret|private)[_-]?key|token|secret|pass(?:word|wd|phrase)?|credentials?)"
)
"""Options of plugins that hold secrets by their name; ``label_key`` and ``max_tokens`` hold none."""


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


def without_secrets(settings: Mapping[str, object]) -> dict[str, JsonValue]:
    """Setting name -> value as JSON has it, for all that hold no secret.

    An option called like a secret is left out unless its text only names environment variables, and so is every value
    that JSON does not have (pydantic's ``SecretStr``). Of an address that writes a secret out, scheme, host, port and
    path stay.
    """
    found = {}
    for name, value in settings.items():
        is_secret = isinstance(value, str) and _OPTION_OF_SECRET.fullmatch(name) and not SECRET.fullmatch(value)
        if not is_secret and _is_json(value):
            found[name] = _json(value)
    return found


def _json(value: object) -> JsonValue:
    if isinstance(value, BaseModel):
        return {name: _json(entry) for name, entry in value}
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    if isinstance(value, str):
        return without_secret(value)
    if isinstance(value, Sequence):
        return [_json(entry) for entry in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    return str(value)


def _is_json(value: object) -> bool:
    if isinstance(value, BaseModel):
        return all(_is_json(entry) for _, entry in value)
    if isinstance(value, Mapping):
        return all(map(_is_json, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str | Path)


def without_secret(text: str) -> str:
    """``text``; of an address that writes a secret out, scheme, host, port and path."""
    if "://" not in text:
        return text
    try:
        return shown(text) if next(written_out(text), None) is not None else text
    except ValueError:  # no address
        return text
