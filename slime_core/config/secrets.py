"""Secrets of a run: settings name the environment variable that holds one, and never hold it themselves.

What a setting says is written into the run folder, shown by ``slime check`` and handed to trackers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel

from slime_core.types import JsonValue

__all__ = [
    "PASS_ENV",
    "PROXIES",
    "SECRET",
    "named_variables",
    "needed_environment",
    "secret_names",
    "shown",
    "unset",
    "without_queries",
    "without_secret",
    "without_secrets",
    "written_out",
]

SECRET = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Where a text names the environment variable that stands there."""

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
"""Names and patterns (fnmatch) of what Python, its libraries and SGLang read."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
"""What code that asks services outside needs in addition."""

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
    """What of ``url`` may be a secret that is written out, in words that do not hold it: user, password, and every
    value of the query, because services name their secrets as they like (``code``, ``sig``, ``k``).

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
    """``text`` with the query of every address in it as ``?***``: libraries write addresses into their errors."""
    return _QUERY.sub(r"\1?***", text)


def needed_environment(*also: str) -> dict[str, str]:
    """The part of this process's environment that an engine, a router or a reward process gets.

    That is what Python, its libraries and SGLang read, without names of secrets such as ``HF_TOKEN``; and without
    conditions what ``also`` and the environment variable :data:`PASS_ENV` name.

    Arguments:
        also: names, or patterns such as ``MY_*``.
    """
    requested = [*also, *os.environ.get(PASS_ENV, "").replace(",", " ").split()]
    found = {}
    for name, value in os.environ.items():
        is_needed = any(fnmatchcase(name, one) for one in _NEEDED) and not _OPTION_OF_SECRET.fullmatch(name)
        if is_needed or any(fnmatchcase(name, one) for one in requested):
            found[name] = value
    return found


def named_variables(settings: Mapping[str, JsonValue]) -> list[str]:
    """The environment variables that settings name as holders of secrets: ``${NAME}`` in a text, ``..._env = NAME``."""
    by_name = [value for name, value in settings.items() if name.endswith("_env") and isinstance(value, str)]
    return [*secret_names(json.dumps(settings, default=dict)), *by_name]


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
