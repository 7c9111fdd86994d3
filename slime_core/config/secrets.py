"""Secrets of a run. Settings name the environment variable of a secret, because run folders, ``slime check`` and
trackers show the values of settings.

Engines and routers of a run answer 401 to requests without the key of the run:

    key_of_run     makes the key in the driver, or reads it from SLIME_ENGINE_KEY
    EngineAccess   the key and the addresses that get it; every actor and reward process receives it when it starts
    send_key_to    adds addresses of the run
    add_key        adds the address and the key of a server outside the run
    engine_headers returns the headers of a request to an address, with the key for these addresses only
    refused_key    returns advice for the error of a refused request in a plugin
    key_advice     yields advice for a server that refuses the key

The key is state of the process, so that no setting, record or command line has it. So are the keys of external servers
that evaluation sets name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, SecretStr

from slime_core.errors import ConfigError
from slime_core.types import JsonValue

SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A reference to an environment variable within a text."""

_QUERY = re.compile(r"(\bhttps?://[^\s?'\"<>]+|\burl: /[^\s?'\"<>]*)\?[^\s'\"<>)]+")
"""The query of an address in a text; the second form is that of urllib3's errors."""

PASS_ENV = "SLIME_PASS_ENV"
"""The environment variable in which a user names further variables for :func:`needed_environment`."""

_NEEDED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "HOSTNAME",
    "XDG_*", "LD_*", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "NO_COLOR", "CUDA*", "NVIDIA_*", "NCCL_*", "GLOO_*",
    "UCX_*", "NVSHMEM_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*", "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*",
    "MALLOC_*", "TORCH*", "PYTORCH_*", "TRITON_*", "SGLANG_*", "SGL_*", "FLASHINFER_*", "HF_*", "TRANSFORMERS_*",
    "TOKENIZERS_*", "MC_*", "SSL_CERT_*", "REQUESTS_CA_BUNDLE",
)  # fmt: skip
"""Names and patterns (fnmatch) of variables that Python, its libraries and SGLang read."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
"""Additional variables for code that calls outside services."""

_OPTION_OF_SECRET = re.compile(
    r"(?i)(?:.*[_.-])?(?:(?:api|access|secret|private)[_-]?key|token|secret|pass(?:word|wd|phrase)?|credentials?)"
)
"""Options of plugins that hold secrets by their name; ``label_key`` and ``max_tokens`` hold none."""


def secret_names(text: str) -> list[str]:
    """Return the environment variables that ``text`` names, in order."""
    return SECRET.findall(text)


def shown(url: str) -> str:
    """Return ``url`` as messages show it: scheme, host, port and path.

    Raises:
        ValueError: it is not an address.
    """
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def unset(*names: str) -> Iterator[str]:
    """Yield the environment variables among ``names`` that are not set in this process."""
    yield from (name for name in names if name not in os.environ)


def written_out(url: str) -> Iterator[str]:
    """Yield names for the parts of ``url`` that may be a secret in plain text: user, password, and every value of the
    query, because services use any name for a secret (``code``, ``sig``, ``k``).

    Example: of ``http://me:x@host/?token=y``, "a password" and "token".
    """
    parts = urlsplit(url)
    if parts.password and not SECRET.search(parts.password):
        yield "a password"
    elif parts.username and not parts.password and not SECRET.search(parts.username):
        yield "a user"
    pairs = parse_qsl(parts.query)
    yield from (name for name, value in pairs if not SECRET.search(value))
    if parts.query and not pairs and not SECRET.search(parts.query):
        yield "a query"


def without_queries(text: str) -> str:
    """Replace the query of every address in ``text`` by ``?***``: libraries write addresses into their errors."""
    return _QUERY.sub(r"\1?***", text)


def needed_environment(*also: str) -> dict[str, str]:
    """Return the part of this process's environment that an engine, a router or a reward process gets.

    It has the variables that Python, its libraries and SGLang read, except secrets such as ``HF_TOKEN``, and all
    variables that ``also`` and the environment variable :data:`PASS_ENV` name.

    Arguments:
        also: names, or patterns such as ``MY_*``.
    """
    requested = [*also, *os.environ.get(PASS_ENV, "").replace(",", " ").split()]
    variables = {}
    for name, value in os.environ.items():
        is_needed = any(fnmatchcase(name, pattern) for pattern in _NEEDED) and not _OPTION_OF_SECRET.fullmatch(name)
        if is_needed or any(fnmatchcase(name, pattern) for pattern in requested):
            variables[name] = value
    return variables


_CHANGES_RESULTS = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SIMULATE_*", "SGLANG_ENABLE_LILICORR_SAMPLING")
"""Variables with which SGLang returns other log-probabilities or tokens than those that it sampled (srt/environ.py)."""


def result_changing_variables() -> list[str]:
    """Return the variables of this process with which engines would return other results than training expects."""
    return sorted(
        name
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in _CHANGES_RESULTS) and value.lower() not in ("", "0", "false")
    )


def named_variables(settings: Mapping[str, JsonValue]) -> list[str]:
    """Return the environment variables that settings name for secrets: ``${NAME}`` in a text, ``..._env = NAME``."""
    by_name = [value for name, value in settings.items() if name.endswith("_env") and isinstance(value, str)]
    return [*secret_names(json.dumps(settings, default=dict)), *by_name]


def without_secrets(settings: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return setting name -> value for JSON, for all settings that hold no secret.

    An option with the name of a secret is left out unless its text is a reference to an environment variable. Values
    that JSON cannot represent (pydantic's ``SecretStr``) are left out. An address with a secret is reduced to scheme,
    host, port and path.
    """
    shown_values = {}
    for name, value in settings.items():
        if isinstance(value, str) and _OPTION_OF_SECRET.fullmatch(name) and not SECRET.fullmatch(value):
            continue
        with suppress(TypeError):
            shown_values[name] = _json(value)
    return shown_values


def _json(value: object) -> JsonValue:
    """Convert ``value`` for JSON, paths as text; raises TypeError for a value that JSON cannot represent."""
    if isinstance(value, BaseModel):
        return {name: _json(entry) for name, entry in value}
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    if isinstance(value, str | Path):
        return without_secret(str(value))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_json(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"a {type(value).__name__}")


def without_secret(text: str) -> str:
    """Reduce an address with a secret to scheme, host, port and path; return any other text unchanged."""
    if "://" not in text:
        return text
    try:
        return shown(text) if next(written_out(text), None) is not None else text
    except ValueError:  # no address
        return text


ENGINE_KEY = "SLIME_ENGINE_KEY"
"""The environment variable with which a user gives the key of external engines; empty: the run uses no key."""

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """The key and the addresses with which a process calls the engines of its run.

    Arguments:
        key: key of the run; None if its engines require none, or the process belongs to no run.
        addresses: ``host:port`` of every server that gets the key.
        others: ``host:port`` of a server outside the run -> its key.
    """

    key: SecretStr | None = None
    addresses: frozenset[str] = frozenset()
    others: Mapping[str, SecretStr] = field(default_factory=dict)

    @property
    def key_text(self) -> str:
        """The key; empty without one."""
        return "" if self.key is None else self.key.get_secret_value()


_access = EngineAccess()


def engine_access() -> EngineAccess:
    """Return the engine access of this process."""
    return _access


def set_engine_access(access: EngineAccess) -> None:
    """Set the key that servers started by this process require, and that its requests carry."""
    global _access
    _access = access


@contextmanager
def key_of_run() -> Iterator[None]:
    """Set the key of a run during the block: the value of :data:`ENGINE_KEY`, or a new key.

    Raises:
        ConfigError: the variable holds no text that a header can carry.
    """
    variable = os.environ.get(ENGINE_KEY)
    if variable and not is_key(variable):
        raise ConfigError(
            f"The environment variable {ENGINE_KEY} holds no text that a header can carry. Accepted is the key of the "
            "engines in one line of ASCII without spaces; leave the variable unset to get a new key for each run."
        )
    before = engine_access()
    key = secrets.token_urlsafe(KEY_BYTES) if variable is None else variable
    set_engine_access(EngineAccess(SecretStr(key) if key else None))
    try:
        yield
    finally:
        set_engine_access(before)


def send_key_to(*urls: str) -> None:
    """Send the key with requests to ``urls``, engines and routers of the run."""
    addresses = {urlsplit(url).netloc for url in urls if url}
    set_engine_access(replace(_access, addresses=_access.addresses | addresses))


def add_key(url: str, variable: str) -> None:
    """Send the key in the environment variable ``variable`` with requests to ``url``, a server outside the run.

    Raises:
        ConfigError: the variable holds no key.
    """
    key = os.environ.get(variable)
    if key is None or not is_key(key):
        raise ConfigError(f"The environment variable {variable} holds no key for {url}. Export it before the run.")
    set_engine_access(replace(_access, others={**_access.others, urlsplit(url).netloc: SecretStr(key)}))


def is_key(text: str | None) -> bool:
    """Return whether a header can carry ``text`` as a key."""
    return bool(text) and text is not None and text.isascii() and text.isprintable() and " " not in text


def engine_headers(url: str) -> dict[str, str]:
    """Return the headers that a request to ``url`` needs: ``Authorization`` for a server of the run.

    A generate function or reward that calls an engine without :class:`Service` adds them to its request.
    """
    address = urlsplit(url).netloc
    if address in _access.others:
        return {"Authorization": f"Bearer {_access.others[address].get_secret_value()}"}
    if _access.key is None or address not in _access.addresses:
        return {}
    return {"Authorization": f"Bearer {_access.key_text}"}


def refused_key(failure: BaseException) -> str:
    """Return advice if ``failure``, an error of any HTTP library, is a server's answer 401, or an empty string."""
    response = getattr(failure, "response", None)  # of requests and httpx
    answers = (getattr(failure, "status", None), getattr(response, "status_code", None), getattr(failure, "code", None))
    if HTTPStatus.UNAUTHORIZED not in answers or _access.key is None:
        return ""
    return (
        "Engines and routers of the run answer 401 to a request without its key: add "
        "slime_core.services.engine_headers(url) to the headers of the request"
    )


def key_advice(status: int, url: str | None = None) -> Iterator[str]:
    """Yield advice if ``status``, the answer of a server, is a refusal of the key.

    Arguments:
        url: address of the server; None for a server of the run.
    """
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return
    if url is not None and urlsplit(url).netloc not in _access.addresses:
        yield (
            "That server requires another key: set model_key_env = 'NAME' in its evaluation set, where NAME is the "
            "environment variable with the key."
        )
    else:
        yield (
            f"The server has another key than the run. Set the environment variable {ENGINE_KEY} to the key "
            "(--api-key) of all external engines and the external router."
        )
