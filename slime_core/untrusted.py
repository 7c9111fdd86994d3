"""Reads untrusted files and texts; every size is bounded before anything is built from it.

Mistakes raise an OSError or a ValueError with the reason; the caller adds the name of the setting. A FIFO, a device or
a folder raises an OSError, so that no reader waits for a writer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MOST_TOML = 2**20
"""Bytes of a file of settings; tomllib reads 1 MiB in about a second."""

MOST_JSON = 64 * 2**20
"""Bytes of a JSON file that describes something: a model's index has about 10 MiB at most."""

MOST_PARTS = 32
"""Most parts of a dotted key; tomllib takes quadratic time and memory for them."""

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_DOTTED = re.compile(rf"(?<![\w-]){_PART}(?:\.[ \t]*+{_PART}){{{MOST_PARTS}}}")

_HUGE = re.compile(r"0[xob][0-9A-Fa-f_]{400}|(?<!\d)\d{400}")


def open_regular(path: Path) -> BinaryIO:
    """Open ``path`` for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    # A FIFO without a writer is opened at once with O_NONBLOCK, which means nothing for regular files.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path, *, limit: int = MOST_JSON) -> str:
    """Read the UTF-8 text of a file.

    Arguments:
        limit: largest size of the file in bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is longer than ``limit``, or not UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than the {limit:,} bytes that are read")
    return content.decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_long_json(text: bytes) -> Any:
    """Parse as :func:`parse_json`, in a quarter of the time; whole numbers of more than 64 bits become floats."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return parse_json(text)  # Python's reads more than the standard allows: NaN, lone surrogates, UTF-16


def as_object(value: object) -> dict[str, Any]:
    """Return ``value``, which must be a JSON object.

    Raises:
        ValueError: it is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"it holds {_kind(value)}; expected an object")
    return value


def read_object(path: Path, *, limit: int = MOST_JSON) -> dict[str, Any]:
    """Read the object in a JSON file; raises as :func:`read_text`, :func:`parse_json` and :func:`as_object`."""
    return as_object(parse_json(read_text(path, limit=limit)))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        ValueError: it is not TOML, nested too deeply, or has keys of too many parts.
    """
    if found := _DOTTED.search(text):
        raise ValueError(f"a key of more than {MOST_PARTS} parts (at line {_line(text, found)})")
    if found := _HUGE.search(text):
        raise ValueError(f"a number of too many digits (at line {_line(text, found)})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
