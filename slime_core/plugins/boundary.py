"""The one place that catches everything: a plugin's failure leaves it as our error, with the plugin's name on it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from slime_core.errors import PluginError, SlimeError

__all__ = ["boundary"]


@contextmanager
def boundary(
    who: object,
    action: str,
    *,
    error: type[SlimeError] = PluginError,
    next_step: str = "",
    locate: bool = False,
    passes: tuple[type[SlimeError], ...] = (),
) -> Iterator[None]:
    """Whatever the block raises comes out as ``error``, saying who failed at what; cancellation passes through.

    Arguments:
        who: printed first; a ``PluginIdentity`` prints as name, distribution, version and entry point.
        action: what was going on, such as ``"importing it"``.
        error: what is raised, chained to the plugin's own exception.
        next_step: what the reader should do.
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
            text = f"{text} ({_place(failure)})"
        raise error(f"{text}\n{next_step}".rstrip()) from failure


def _is_cancellation(failure: BaseException) -> bool:
    from asyncio import CancelledError  # here: it takes longer to import than the rest of this room

    return isinstance(failure, KeyboardInterrupt | CancelledError | GeneratorExit)


def _place(failure: BaseException) -> str:
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
