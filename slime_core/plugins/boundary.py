"""The one place that catches everything: a plugin's failure leaves it as our error, with the plugin's name on it."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_core.errors import PluginError, SlimeError

__all__ = ["boundary", "place_of"]


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
    """Whatever the block raises comes out as ``error``, saying who failed at what; cancellation passes through.

    Arguments:
        who: printed first; a ``PluginIdentity`` prints as name, distribution, version and entry point.
        action: what was going on, such as ``"importing it"``.
        error: what is raised, chained to the plugin's own exception.
        next_step: what the reader should do; a function of the exception where that depends on it.
        locate: also say in which file and line it was raised; not of an error of ours, which says what is wrong itself.
        passes: what the block may raise as it is, such as ``(SlimeError,)`` where the core's own code runs in it.
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
        if locate and not isinstance(failure, SlimeError):
            text = " ".join(filter(None, (text, place_of(failure))))
        step = next_step if isinstance(next_step, str) else next_step(failure)
        raise error(f"{text}\n{step}".rstrip()) from failure


def _is_cancellation(failure: BaseException) -> bool:
    from asyncio import CancelledError  # here: it takes longer to import than the rest of this room

    return isinstance(failure, KeyboardInterrupt | CancelledError | GeneratorExit)


def place_of(failure: BaseException) -> str:
    """``(FILE:LINE)`` where it was raised; empty: the import itself failed, or the error names its place.

    Example: ``(./mine.py:3)``, of the line ``import numpyy``.
    """
    if isinstance(failure, SyntaxError):
        return ""
    frames = traceback.extract_tb(failure.__traceback__)
    first = max((number for number, one in enumerate(frames, 1) if one.filename == _LOADING), default=0)
    own = [one for one in frames[first:] if not one.filename.startswith(_IMPORTS)]
    return f"({own[-1].filename}:{own[-1].lineno})" if own else ""


_IMPORTS = ("<frozen importlib", importlib.__file__)
_LOADING = str(Path(__file__).with_name("loading.py"))
"""What calls the imports of plugins; the frames after it are those of the plugin."""
