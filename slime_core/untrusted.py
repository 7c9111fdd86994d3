"""Reads untrusted files and texts, and limits foreign code: every size is bounded before anything is built from it.

Mistakes raise an OSError or a ValueError with the reason; the caller adds the name of the setting. A FIFO, a device or
a folder raises an OSError, so that no reader waits for a writer.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import stat
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MOST_TOML = 2**20
"""Bytes of a file of settings; tomllib reads 1 MiB in about a second."""

MOST_JSON = 64 * 2**20
"""Bytes of a JSON file that describes something: a model's index has about 10 MiB at most."""

LOOK_S = 0.05
"""Seconds between two checks of the CPU time of a limited thread; without a limited block there are no checks."""

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
        raise ValueError(f"it holds {_kind(value)} where an object is expected")
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


@contextmanager
def limited(*, seconds: float, nbytes: int) -> Iterator[None]:
    """Limit a block of foreign code to ``seconds`` of CPU time and ``nbytes`` more memory.

    Blocks of several threads run one after the other. The memory limit applies to the process, so the allocations of
    other threads count too. A single operation that does not return to the interpreter is bounded by memory only.

    Raises:
        TimeoutError: it takes longer.
        MemoryError: it takes more.
    """
    with _ONE_AT_A_TIME, _memory(nbytes), _raised_after(seconds):
        yield


_ONE_AT_A_TIME = threading.RLock()
"""Serialises limited blocks: otherwise one thread would restore the memory limit that another has set."""


@contextmanager
def _memory(nbytes: int) -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min([used + nbytes, *(one for one in (soft, hard) if one >= 0)]), hard))
    try:
        yield
    except MemoryError:
        raise MemoryError(f"it took more than {nbytes / 2**30:g} GiB") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _raised_after(seconds: float) -> Iterator[None]:
    """Let another thread raise the error in this one, because only the main thread can receive a signal for it."""
    _WATCH.start(seconds)
    is_raised = False
    try:
        yield
    except TimeoutError as error:
        is_raised = not error.args
        raise TimeoutError(f"it took more than {seconds:g} s") from (error if error.args else None)
    finally:
        _WATCH.end(is_raised=is_raised)


class _Watch:
    """Watcher of the CPU time of the thread that is in a limited block. The watching thread is kept, because starting a
    thread takes longer than most blocks; it sleeps while there is no block."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._has_block = threading.Event()
        self._block: tuple[int, int, float] | None = None
        self._thread: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """Limit the CPU time of this thread, from now on, to ``seconds``."""
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._look, name="limits", daemon=True)
            self._thread.start()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        with self._changing:
            self._block = (threading.get_ident(), clock, time.clock_gettime(clock) + seconds)
            self._has_block.set()

    def end(self, *, is_raised: bool) -> None:
        """Remove the limit of this thread.

        Arguments:
            is_raised: the error has been raised in the block.
        """
        with self._changing:
            if self._block is None and not is_raised:  # the block ended first
                # Only then: from here on CPython 3.11 looks for errors at every call, and a profiled thread for ever.
                _raise_in(threading.get_ident(), None)
            self._block = None

    def _look(self) -> None:
        while self._has_block.wait():
            time.sleep(LOOK_S)
            with self._changing:
                if self._block is None:
                    self._has_block.clear()
                elif time.clock_gettime(self._block[1]) >= self._block[2]:
                    _raise_in(self._block[0], TimeoutError)
                    self._block = None


_WATCH = _Watch()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise ``error`` in ``thread`` when it next runs Python code; None: discard the error that waits to be raised."""
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _kind(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
