"""Turns exceptions of plugins and user code into errors of slime that name who failed, and where.

:func:`boundary` is the one place that catches every exception.
"""

from __future__ import annotations

import importlib
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from slime_core.errors import PluginError, SlimeError

__all__ = ["PROCESS_LOG", "boundary", "describe", "log_traceback", "place_of", "tracebacks_into"]


@contextmanager
def boundary(
    who: object,
    action: str,
    *,
    error: type[SlimeError] = PluginError,
    next_step: str | Callable[[BaseException], str] = "",
    locate: bool = False,
    passes: tuple[type[SlimeError], ...] = (),
) -> Iterator[None]:
    """Raise any exception of the block as ``error``, with who failed at what; cancellation passes.

    Arguments:
        who: the start of the message, such as a ``Plugin``.
        action: the action of the block, such as ``"importing it"``.
        error: the type that is raised, chained to the exception.
        next_step: advice to the user; a function of the exception if it depends on the exception.
        locate: add the place in the user's code and the log with the traceback, unless the exception is a SlimeError.
        passes: exceptions that pass unchanged, such as ``(SlimeError,)`` if the block runs code of the core.
    """
    try:
        yield
    except passes:
        raise
    # SystemExit: a plugin that leaves while it is imported would end the run as if it had succeeded.
    except BaseException as failure:
        if _is_cancellation(failure):
            raise
        from slime_core.config.secrets import without_queries  # loads pydantic, which listing plugins does without

        text = f"{who}: {action} failed with {type(failure).__name__}: {without_queries(str(failure))}"
        step = next_step if isinstance(next_step, str) else next_step(failure)
        if locate and not isinstance(failure, SlimeError):
            place = place_of(failure)
            text = " ".join(filter(None, (text, place)))
            step = "\n".join(filter(None, (step, log_traceback(text, failure, place))))
        raise error(f"{text}\n{step}".rstrip()) from failure


def _is_cancellation(failure: BaseException) -> bool:
    from asyncio import CancelledError  # here: it takes longer to import than the rest of this package

    return isinstance(failure, KeyboardInterrupt | CancelledError | GeneratorExit)


def place_of(failure: BaseException) -> str:
    """Return ``(FILE:LINE, in FUNCTION)`` of the innermost frame of the user's code, not of libraries that it calls.

    Without a file of the user, the frame is the innermost one of the package that slime called. Empty if the import
    itself failed, or if the error names its place.

    Example: ``(mine.py:3, in reward)``; for a line outside of functions ``(./mine.py:3)``.
    """
    if isinstance(failure, SyntaxError):
        return ""
    frames = traceback.extract_tb(failure.__traceback__)
    loading = [number for number, frame in enumerate(frames, 1) if frame.filename in LOADERS]
    called = [frame for frame in frames[min(loading, default=0) :] if not frame.filename.startswith(_SKIPPED)]
    packages = [_package_of(frame.filename) for frame in called]
    callers = (None, "slime_core", *(_package_of(frame.filename) for frame in frames[:1]))
    others = [package for package in packages if package not in callers]
    user = "" if "" in packages else next(iter(others), packages[-1] if packages else None)
    places = [frame for frame, package in zip(called, packages, strict=True) if package == user]
    if not places:
        return ""
    function = "" if places[-1].name == "<module>" else f", in {places[-1].name}"
    return f"({places[-1].filename}:{places[-1].lineno}{function})"


def _package_of(file: str) -> str | None:
    """Return the package of a library's file; empty for a file of the user, None for a file of Python itself."""
    path = os.path.abspath(file)
    for folder in _LIBRARIES:
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :].split(os.sep)[0].removesuffix(".py")
    if file.startswith("<frozen") or path.startswith(_PYTHON + os.sep):
        return None
    if path.startswith(_CORE + os.sep):
        return "slime_core"
    # A plugin in a checkout of this repository, installed editable.
    return next((name for folder, name in pairwise(path.split(os.sep)) if folder == "src" and name[:6] == "slime_"), "")


def describe(failure: Exception) -> str:
    """Return type, message and place of an exception of the user's code, and the log that has its traceback.

    Example: ``KeyError: 'gone' (mine.py:3, in solve). The traceback is in outputs/run-1/logs/sampler.log.``
    """
    text = f"{type(failure).__name__}: {failure}"
    if isinstance(failure, SlimeError) or failure.__traceback__ is None:
        return text
    place = place_of(failure)
    text = " ".join(filter(None, (text, place)))
    log = log_traceback(text, failure, place)
    return f"{text}. {log}" if log else text


def log_traceback(what: str, failure: BaseException, place: str) -> str:
    """Write the traceback of ``failure`` into the log of this process, the first time that ``place`` raises its type.

    Returns:
        A sentence that names the log; empty if the process has none.
    """
    logger = logging.getLogger(__name__)
    if (type(failure), place) not in _LOGGED:
        _LOGGED.add((type(failure), place))
        logger.info("%s", what, exc_info=failure)
    for handler in (*logger.handlers, *logging.getLogger().handlers):
        if handler.name == PROCESS_LOG and isinstance(handler, logging.StreamHandler):
            return f"The traceback is in {handler.stream.name}."
    return ""


def tracebacks_into(log: Path) -> None:
    """From now on ``log`` gets the tracebacks of failures of plugins in this process."""
    handler = logging.FileHandler(log, encoding="utf-8", delay=False)
    handler.set_name(PROCESS_LOG)
    logger = logging.getLogger(__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


_LOGGED: set[tuple[type[BaseException], str]] = set()
PROCESS_LOG = "log of the process"
"""Name of the log handler that writes into a file of the run folder."""

_PYTHON = os.path.dirname(os.__file__)
_LIBRARIES = tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
_CORE = str(Path(__file__).parents[1])
_IMPORTS = ("<frozen importlib", importlib.__file__)
LOADERS = (str(Path(_CORE, "plugins", "loading.py")), str(Path(__file__).with_name("neighbours.py")))
"""Files that import plugins. The frames after the first one of these files belong to the plugin."""
_SKIPPED = (*_IMPORTS, *LOADERS)
