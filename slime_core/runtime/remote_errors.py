"""Errors of actors on the driver: the SlimeError that an actor raised, or a RemoteError for any other failure."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from ray._private import worker
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    RayError,
    RayTaskError,
)

from slime_core import errors
from slime_core.errors import RemoteError, SlimeError

__all__ = ["SealedError", "last_words", "local_error"]

TAIL_LINES = 15
"""Lines kept of a remote traceback: the innermost frames and the message."""

LAST_LINES, LAST_BYTES = 15, 64 * 1024
"""Of the output of a process before it died."""

_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
_MARK = re.compile(r":\w+:\S*")
"""A line of Ray's own in the output of a process: which task the next lines belong to."""

_SEAL = re.compile(r"slime-error:([A-Za-z0-9+/=]+)")
_CLASSES: dict[str, type[SlimeError]] = {name: vars(errors)[name] for name in errors.__all__}
_NODE = re.compile(r"[Nn]ode has (crashed|died)|[Nn]ode was (terminated|marked dead)|[Rr]aylet (died|is terminated)")
"""What Ray says of an actor that is dead because a node of the cluster is (ray 2.60)."""

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
    if isinstance(error, LocalRayletDiedError | NodeDiedError) or _NODE.search(str(error)):
        return RemoteError(_ray_died(error, who))
    if isinstance(error, ActorDiedError):
        return SealedError.open(str(error)) or RemoteError(
            "\n".join([f"{who} died.", _tail(str(error)), *last_words(str(error), _logs())])
        )
    if isinstance(error, GetTimeoutError):
        return RemoteError(f"{who} did not hand over its result in time.\n{_tail(str(error))}")
    return RemoteError(f"{who} is lost ({type(error).__name__}).\n{_tail(str(error))}")


def _ray_died(error: RayError, who: str) -> str:
    logs = _logs()
    read = "" if logs is None else f" Ray's logs are in {logs} (raylet.out, raylet.err)."
    return (
        f"Ray died: a node of the cluster is gone, its raylet process ended, and {who} with it. Often the kernel's "
        f"out-of-memory killer did it (dmesg says so).{read} Start the run again with --load RUN_FOLDER.\n"
        f"{_tail(str(error))}"
    )


def last_words(message: str, logs: Path | None) -> list[str]:
    """The last lines of output of the process in ``message``; empty: there are none, or it ran on another node.

    Arguments:
        message: Ray's, about an actor that died; it names the process.
        logs: where Ray keeps what its processes on this node print; None: unknown.
    """
    pid = _PID.search(message)
    if pid is None or logs is None:
        return []
    for path in sorted(logs.glob(f"worker-*-{pid[1]}.err")):
        text = path.read_bytes()[-LAST_BYTES:].decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and not _MARK.fullmatch(line)]
        if lines:
            return [f"The last lines of {path}:", *(f"  {line}" for line in lines[-LAST_LINES:])]
    return []


def _logs() -> Path | None:
    node: Any = worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())


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
