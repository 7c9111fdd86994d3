"""What a remote failure becomes on the driver: the error that was raised there if it is ours, else a RemoteError."""

from __future__ import annotations

import base64
import json
import re

from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from slime_core import errors
from slime_core.errors import RemoteError, SlimeError

__all__ = ["SealedError", "local_error"]

TAIL_LINES = 15
"""Lines kept of a remote traceback: the innermost frames and the message."""

_SEAL = re.compile(r"slime-error:([A-Za-z0-9+/=]+)")
_CLASSES: dict[str, type[SlimeError]] = {name: vars(errors)[name] for name in errors.__all__}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SealedError(RuntimeError):
    """A SlimeError of an actor's constructor, in a form that survives Ray, which keeps only the text of those.

    What is sealed is a name and a message. A class that is not in :mod:`slime_core.errors` becomes its nearest ancestor
    there; nothing in a text can make this process run code.
    """

    @classmethod
    def seal(cls, error: SlimeError) -> SealedError:
        """``error`` as text."""
        name = next(one.__name__ for one in type(error).__mro__ if one in _CLASSES.values())
        # Base64: Ray wraps the message of an error in a text of its own, quoted or not.
        return cls(f"slime-error:{base64.b64encode(json.dumps([name, str(error)]).encode()).decode()}")

    @staticmethod
    def open(text: str) -> SlimeError | None:
        """The error sealed somewhere in ``text``, if any."""
        found = _SEAL.search(text)
        if found is None:
            return None
        try:
            name, message = json.loads(base64.b64decode(found[1]))
            return _CLASSES[name](message)
        except (ValueError, TypeError, KeyError):  # not of our making
            return None


def local_error(error: RayError, *, who: str) -> SlimeError:
    """The SlimeError that ``who`` raised, class and message kept, or a RemoteError with the remote traceback's tail."""
    if isinstance(error, RayTaskError):
        return _from_task(error, who)
    if isinstance(error, ActorDiedError):
        return SealedError.open(str(error)) or RemoteError(f"{who} died.\n{_tail(str(error))}")
    if isinstance(error, GetTimeoutError):
        return RemoteError(f"{who} did not hand over its result in time.\n{_tail(str(error))}")
    return RemoteError(f"{who} is lost ({type(error).__name__}).\n{_tail(str(error))}")


def _from_task(error: RayTaskError, who: str) -> SlimeError:
    cause = error.cause
    if isinstance(cause, SlimeError):
        return cause
    if isinstance(cause, RayError):  # the actor itself waited for another one that failed
        return local_error(cause, who=f"an actor that {who} called")
    return RemoteError(f"{who} failed with {type(cause).__name__}: {cause}\n{_tail(str(error))}")


def _tail(text: str) -> str:
    lines = _COLOURS.sub("", text).strip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
