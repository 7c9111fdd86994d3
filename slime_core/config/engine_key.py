"""The key without which engines and routers of a run answer 401: one for each run, known to its processes only.

    key_of_run     the driver makes the key, or takes that of the user from SLIME_ENGINE_KEY
    EngineAccess   the key and those addresses; every actor and every reward process of the run gets it when it starts
    send_key_to    requests to these addresses carry the key
    engine_headers the headers of a request to an address: the key, where the address is one of the run
    key_advice     what to do about a server that refuses the key

The key is a state of the process, like the environment variable that a user sets, so that no setting, no record and no
command line holds it. A request to any other address never carries it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from urllib.parse import urlsplit

from pydantic import SecretStr

from slime_core.errors import ConfigError

__all__ = [
    "ENGINE_KEY",
    "EngineAccess",
    "engine_access",
    "engine_headers",
    "key_advice",
    "key_of_run",
    "send_key_to",
    "set_engine_access",
]

ENGINE_KEY = "SLIME_ENGINE_KEY"
"""The environment variable with which a user gives the key of external engines; empty: the run uses no key."""

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """What a process needs to call the engines of its run.

    Arguments:
        key: what they require; None: nothing, or this process belongs to no run.
        addresses: ``host:port`` of every server that it is sent to.
    """

    key: SecretStr | None = None
    addresses: frozenset[str] = frozenset()

    @property
    def key_text(self) -> str:
        """The key; empty: there is none."""
        return "" if self.key is None else self.key.get_secret_value()


_access = EngineAccess()


def engine_access() -> EngineAccess:
    """That of this process."""
    return _access


def set_engine_access(access: EngineAccess) -> None:
    """From now on servers that this process starts require ``access.key``, and its requests carry it."""
    global _access
    _access = access


@contextmanager
def key_of_run() -> Iterator[None]:
    """A key for the length of a run: that in :data:`ENGINE_KEY`, or a new one.

    Raises:
        ConfigError: the variable holds no text that a header can carry.
    """
    given = os.environ.get(ENGINE_KEY)
    if given and not (given.isascii() and given.isprintable() and " " not in given):
        raise ConfigError(
            f"The environment variable {ENGINE_KEY} holds no text that a header can carry. Accepted is the key of the "
            "engines in one line of ASCII without spaces; leave the variable unset to get a new key for each run."
        )
    before = engine_access()
    key = secrets.token_urlsafe(KEY_BYTES) if given is None else given
    set_engine_access(EngineAccess(SecretStr(key) if key else None))
    try:
        yield
    finally:
        set_engine_access(before)


def send_key_to(*urls: str) -> None:
    """Requests to the servers at ``urls``, engines and routers of the run, carry the key."""
    addresses = {urlsplit(url).netloc for url in urls if url}
    set_engine_access(replace(_access, addresses=_access.addresses | addresses))


def engine_headers(url: str) -> dict[str, str]:
    """The headers that a request to ``url`` needs: ``Authorization``, if a server of the run answers there; else none.

    A generate function or reward that calls an engine by itself adds them to its request.
    """
    if _access.key is None or urlsplit(url).netloc not in _access.addresses:
        return {}
    return {"Authorization": f"Bearer {_access.key_text}"}


def key_advice(status: int) -> Iterator[str]:
    """What to do where a server answered with ``status``, if that is a refusal of the key."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        yield (
            f"The key of the run is not the server's. Set the environment variable {ENGINE_KEY} to the one key with "
            "which all external engines, and an external router, were started (--api-key)."
        )
