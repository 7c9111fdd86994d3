"""The key without which engines and routers of a run answer 401: one for each run, known to its processes only.

    key_of_run     the driver makes the key, or takes that of the user from SLIME_ENGINE_KEY
    EngineAccess   the key and those addresses; every actor and every reward process of the run gets it when it starts
    send_key_to    requests to these addresses carry the key
    add_key        requests to a server that is none of the run carry a key of its own
    engine_headers the headers of a request to an address: the key, where the address is one of the run
    refused_key    what to do about an error that such a refusal raised in the code of a plugin
    key_advice     what to do about a server that refuses the key

The key is a state of the process, like the environment variable that a user sets, so that no setting, no record and no
command line holds it. A request to any other address never carries it. The keys of external servers that evaluation
sets name are kept in the same way.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from urllib.parse import urlsplit

from pydantic import SecretStr

from slime_core.errors import ConfigError

__all__ = [
    "ENGINE_KEY",
    "EngineAccess",
    "add_key",
    "engine_access",
    "engine_headers",
    "is_key",
    "key_advice",
    "key_of_run",
    "refused_key",
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
        others: ``host:port`` of a server that is none of the run -> the key of that server.
    """

    key: SecretStr | None = None
    addresses: frozenset[str] = frozenset()
    others: Mapping[str, SecretStr] = field(default_factory=dict)

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
    if given and not is_key(given):
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


def add_key(url: str, variable: str) -> None:
    """Requests to ``url``, a server that is none of the run, carry the key in the environment variable ``variable``.

    Raises:
        ConfigError: the variable holds no key.
    """
    key = os.environ.get(variable)
    if key is None or not is_key(key):
        raise ConfigError(f"The environment variable {variable} holds no key for {url}. Export it before the run.")
    set_engine_access(replace(_access, others={**_access.others, urlsplit(url).netloc: SecretStr(key)}))


def is_key(text: str | None) -> bool:
    """Whether a header can carry it."""
    return bool(text) and text is not None and text.isascii() and text.isprintable() and " " not in text


def engine_headers(url: str) -> dict[str, str]:
    """The headers that a request to ``url`` needs: ``Authorization``, if a server of the run answers there; else none.

    A generate function or reward that calls an engine by itself adds them to its request.
    """
    address = urlsplit(url).netloc
    if address in _access.others:
        return {"Authorization": f"Bearer {_access.others[address].get_secret_value()}"}
    if _access.key is None or address not in _access.addresses:
        return {}
    return {"Authorization": f"Bearer {_access.key_text}"}


def refused_key(failure: BaseException) -> str:
    """What to do where ``failure``, an error of any HTTP library, is the answer 401 of a server; empty: it is not."""
    response = getattr(failure, "response", None)  # of requests and httpx
    answers = (getattr(failure, "status", None), getattr(response, "status_code", None), getattr(failure, "code", None))
    if HTTPStatus.UNAUTHORIZED not in answers or _access.key is None:
        return ""
    return (
        "Engines and routers of the run answer 401 to a request without its key: add "
        "slime_core.services.engine_headers(url) to the headers of the request"
    )


def key_advice(status: int, url: str | None = None) -> Iterator[str]:
    """What to do where a server answered with ``status``, if that is a refusal of the key.

    Arguments:
        url: of the server; None: it is one of the run.
    """
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return
    if url is not None and urlsplit(url).netloc not in _access.addresses:
        yield (
            "That server requires a key of its own: give the set of evaluation prompts whose model it is "
            "model_key_env = 'NAME', the environment variable that holds it."
        )
    else:
        yield (
            f"The key of the run is not the server's. Set the environment variable {ENGINE_KEY} to the one key with "
            "which all external engines, and an external router, were started (--api-key)."
        )
