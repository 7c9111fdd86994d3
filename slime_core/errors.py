"""Every error that slime raises on purpose.

    SlimeError                     the root; the command line prints its message and no traceback
    ├── UserError                  a mistake of the user; exit code 2
    │   ├── ConfigError            settings: unknown, missing, out of range, contradictory (also a ValueError)
    │   ├── DataError              a data file, with file and line number (also a ValueError)
    │   └── PluginError            a plugin that cannot be found or loaded (also a ValueError)
    │       └── ManifestMismatch   a process has other plugins than the driver
    └── RunError                   something failed while running; exit code 1 (also a RuntimeError)
        ├── PlacementError         the cluster cannot hold the request
        ├── EngineError            an inference server or the router failed or died
        │   ├── RequestRefused     a request that every engine would refuse; it is not retried
        │   ├── RequestFailed      a request that no engine answered in time, retries included
        │   └── ServerDied         a server of the run that had answered died or hangs; the run restarts
        ├── ServiceError           an HTTP service gave no usable answer
        ├── WeightSyncError        learner and engines do not, or would not, hold the same weights
        │   └── EngineSilent       an engine gave no answer while weights were published; the run restarts
        ├── ParityError             learner and engines give the same tokens other log-probabilities
        ├── CheckpointError        a checkpoint cannot be written or read
        ├── NonFiniteError         a NaN or an infinity in a loss, a gradient or a weight
        ├── WaitTimeout            a wait exceeded its limit
        └── RemoteError            an actor failed; carries the remote message
            └── ProcessDied        the actor's process is gone; the run restarts
                └── NodeDied       a node of the cluster is gone, or Ray itself

Mistakes in settings are collected (:class:`Mistake`), so that a user sees all of them in one error.

A message has the value, the problem, the accepted values and the next step. All errors can be pickled, because Ray
sends them between processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EngineSilent",
    "ManifestMismatch",
    "NodeDied",
    "NonFiniteError",
    "ParityError",
    "PlacementError",
    "PluginError",
    "ProcessDied",
    "RemoteError",
    "RequestFailed",
    "RequestRefused",
    "RunError",
    "ServerDied",
    "ServiceError",
    "SlimeError",
    "UserError",
    "WaitTimeout",
    "WeightSyncError",
]


class SlimeError(Exception):
    """The root of all errors that slime raises on purpose."""

    exit_code = 1


class UserError(SlimeError):
    """A mistake of the user, raised before anything expensive starts if possible."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """One or more settings are wrong; the message lists all of them.

    Attributes:
        mistakes: the mistakes in the settings of a command, each once; empty for other errors.
        keys: the settings that ``mistakes`` blame.
    """

    def __init__(self, message: str, mistakes: Sequence[Mistake] = ()) -> None:
        super().__init__(message)
        self.mistakes = tuple(mistakes)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(mistake.key for mistake in self.mistakes if mistake.key)


class DataError(UserError, ValueError):
    """A data file is missing, empty or malformed; the message names file and line."""


class PluginError(UserError, ValueError):
    """A plugin cannot be found or loaded; the message names its distribution and version."""


class ManifestMismatch(PluginError):
    """This process would run other plugin code than the driver does."""


class RunError(SlimeError, RuntimeError):
    """A run failed for a reason other than the user's request."""


class PlacementError(RunError):
    """The cluster has too few devices for the run; the message has the arithmetic."""


class EngineError(RunError):
    """An inference server or the router failed; the message ends with the last lines of its log."""


class RequestRefused(EngineError):
    """The engine refused this request and would refuse it again; the message has the reason."""


class RequestFailed(EngineError):
    """No engine answered a request in time; ``cause`` is one word for how the last attempt failed."""

    def __init__(self, message: str, cause: str = "engine") -> None:
        super().__init__(message)
        self.cause = cause


class ServerDied(EngineError):
    """An inference server or the router of the run, which had answered, died, was stopped or hangs."""


class ServiceError(RunError):
    """An HTTP service gave no usable answer to a request.

    Attributes:
        cause: one word to count by: ``refused`` (4xx, a redirection, or a URL that cannot be requested),
            ``unavailable`` (5xx, or a status that was to be retried), ``unreachable`` (no connection), ``timeout``,
            ``invalid`` (no JSON, or an answer that is too large).
        status: HTTP status of the last answer; None without an answer.
        gave_up: the time limit ended the retries.
    """

    def __init__(
        self, message: str, cause: str = "unavailable", status: int | None = None, gave_up: bool = False
    ) -> None:
        super().__init__(message, cause, status, gave_up)
        self.cause = cause
        self.status = status
        self.gave_up = gave_up

    def __str__(self) -> str:
        return str(self.args[0])


class WeightSyncError(RunError):
    """Learner and engines would not, or do not, hold the same weights."""


class EngineSilent(WeightSyncError):
    """An engine did not answer while weights were published: it hangs, or its node is gone, which Ray reports later."""


@dataclass(frozen=True, slots=True)
class ComparedToken:
    """A response token, and its log-probability under the learner and in the engine that sampled it.

    Arguments:
        sample: ``index`` of its sample.
        group: ``group_index`` of its sample; None if unknown.
        position: place in the response, from 0.
        response_length: tokens of the response.
        token: its id.
        learner_log_prob, engine_log_prob: in nats.
    """

    sample: int
    group: int | None
    position: int
    response_length: int
    token: int
    learner_log_prob: float
    engine_log_prob: float

    @property
    def difference(self) -> float:
        """Absolute difference of the two log-probabilities, in nats."""
        return abs(self.learner_log_prob - self.engine_log_prob)


class ParityError(RunError):
    """Learner and engines give the same tokens other log-probabilities; nothing was trained on them.

    Attributes:
        samples_file: file with the compared tokens and both log-probabilities, of the rank with ``worst``, in the
            format of ``--save-debug-train-data``; None if none was written.
        worst: the token with the largest difference; None if unknown.
    """

    def __init__(self, message: str, samples_file: Path | None = None, worst: ComparedToken | None = None) -> None:
        super().__init__(message, samples_file, worst)
        self.samples_file = samples_file
        self.worst = worst

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class NonFiniteError(RunError):
    """A loss, a gradient or a weight is NaN or infinite; nothing was published."""


class WaitTimeout(RunError):
    """A wait exceeded its limit; the message names the processes, with their stacks."""


class RemoteError(RunError):
    """An actor failed; the message has its name and its message."""


class ProcessDied(RemoteError):
    """The process of an actor died without raising an error."""


class NodeDied(ProcessDied):
    """A node of the cluster is gone, or Ray itself."""


DEATHS = (ProcessDied, ServerDied, EngineSilent)
"""Errors after which a run restarts from its newest checkpoint."""


LETTERS = 4
"""Minimum letters of a name that is completed."""

_NEXT_STEP = "slime config explain KEY describes a setting."


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in the settings.

    Arguments:
        message: the place, the value and the accepted ones.
        key: the setting that it blames, which rules then do not read; empty if there is none.
        ending: computes the end of the message if that is slow. A command parses its arguments several times, each time
            with the settings of more plugins, and reports only the mistakes of the last time.
    """

    message: str
    key: str = ""
    ending: Callable[[], str] | None = None

    def __str__(self) -> str:
        return self.message if self.ending is None else self.message + self.ending()


def config_error(mistakes: Sequence[Mistake]) -> ConfigError:
    """Make one error that lists all mistakes, each once, with the next step."""
    unique = list({(text := str(mistake)): Mistake(text, mistake.key) for mistake in mistakes}.values())  # picklable
    count = "1 mistake" if len(unique) == 1 else f"{len(unique)} mistakes"
    listed = "\n".join(f"  - {mistake}".replace("\n", "\n    ") for mistake in unique)
    return ConfigError(f"{count} in the settings:\n{listed}\n{_NEXT_STEP}", unique)


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str]) -> str:
    """Return ``rows`` under ``head`` in aligned columns."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  " + "  ".join(line).rstrip() for line in padded)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean x?`` for the only candidate that starts with ``name``, or for one that differs in one or
    two letters, or an empty string."""
    candidates = list(candidates)
    completions = [candidate for candidate in candidates if len(name) >= LETTERS and candidate.startswith(name)]
    if len(completions) == 1:
        return f"; did you mean {completions[0]}?"
    most = 2 if len(name.strip("-")) > SHORT else 1
    close = [(_edits(name, candidate), candidate) for candidate in difflib.get_close_matches(name, candidates, n=5)]
    edits, candidate = min(close, default=(most + 1, ""), key=lambda pair: pair[0])
    return f"; did you mean {candidate}?" if edits <= most else ""


SHORT = 4
"""Letters of a name in which two differences make another word."""


def _edits(first: str, second: str) -> int:
    """Return the number of letters to add, remove, change or swap with their neighbour."""
    before, row = list[int](), list(range(len(second) + 1))
    for place, letter in enumerate(first):
        above, before, row = before, row, [place + 1]
        for other, target in enumerate(second):
            cost = min(before[other + 1] + 1, row[other] + 1, before[other] + (letter != target))
            if other and place and letter == second[other - 1] and target == first[place - 1]:
                cost = min(cost, above[other - 1] + 1)
            row.append(cost)
    return row[-1]
