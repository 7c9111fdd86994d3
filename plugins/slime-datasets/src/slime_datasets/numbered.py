"""Prompts by their number in the run, and their groups.

Stream           prompts by number; number ``n`` is the same prompt after every restart
InMemory         a stream of rows that are all in memory, shuffled by epoch
NumberedPrompts  a data source that returns the prompts of a stream in the order of their numbers
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from slime_core import RunView
from slime_core.errors import CheckpointError, DataError, RunError
from slime_core.provisional import PromptRequest, PromptRow
from slime_core.types import BAD, TOO_LONG, JsonValue, PromptGroup, Sample
from slime_datasets.rows import prompts_of

__all__ = [
    "EMPTY",
    "InMemory",
    "NumberedPrompts",
    "Stream",
    "nothing_left",
    "report_left_out",
    "requested",
    "select_short",
]

EMPTY = "empty"
"""Reason for which a row is left out, beside ``TOO_LONG`` and ``BAD``; empty lines are not counted."""


class Stream(Protocol):
    """Prompts by their number."""

    def at(self, number: int) -> PromptRow:
        """Return prompt ``number`` of the run."""
        ...

    def prepare(self, stop: int) -> None:
        """Prepare the prompts before number ``stop``."""
        ...

    def identity(self) -> dict[str, JsonValue]:
        """Return everything that determines the prompt of a number; it must be equal on a resume."""
        ...

    def state(self, numbers: Sequence[int]) -> dict[str, JsonValue]:
        """Return further state for :meth:`restore`, with which the prompts ``numbers`` are found fast."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from ``state``."""
        ...

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        ...


class InMemory:
    """A stream of rows that are all in memory."""

    def __init__(self, request: PromptRequest) -> None:
        self._request = request
        bad: list[str] = []
        rows = [row for _, row in prompts_of(request, bad=bad if request.skips_bad else None)]
        self._rows = [row for row, is_short in zip(rows, select_short(request, rows), strict=True) if is_short]
        report_left_out(request, TOO_LONG, len(rows) - len(self._rows))
        report_left_out(request, BAD, len(bad), bad)
        if not self._rows:
            raise nothing_left(request, len(rows) + len(bad), bad=len(bad))
        self._orders: dict[int, list[int]] = {}

    def at(self, number: int) -> PromptRow:
        """See :class:`Stream`."""
        epoch, place = divmod(number, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def prepare(self, stop: int) -> None:
        """Do nothing: all rows are in memory."""

    def identity(self) -> dict[str, JsonValue]:
        """See :class:`Stream`."""
        digest = hashlib.sha256()  # of prompts and labels in file order
        for row in self._rows:
            digest.update(json.dumps([row.prompt, row.label], default=str).encode() + b"\n")
        seed, shuffle = self._request.seed, self._request.shuffle
        return {"prompts": len(self._rows), "digest": digest.hexdigest(), "seed": seed, "shuffle": shuffle}

    def state(self, numbers: Sequence[int]) -> dict[str, JsonValue]:
        """Return no further state: the files determine the prompts."""
        del numbers
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing: there is no further state."""

    def __len__(self) -> int:
        return len(self._rows)

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._rows)))
            if self._request.shuffle:
                # A string seeds by its bytes: the same order on every machine and Python version.
                random.Random(f"{self._request.seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._orders[epoch]


def select_short(request: PromptRequest, rows: Sequence[PromptRow]) -> Sequence[bool]:
    """Return for each row whether its prompt is short enough.

    Raises:
        DataError: a prompt cannot be turned into tokens; names file and line.
    """
    if not rows:
        return []
    try:
        return request.filter.select([(row.prompt, row.tools) for row in rows])
    except DataError as problem:
        if len(rows) == 1:
            raise DataError(f"{rows[0].place}: {problem}") from None
        for row in rows:
            select_short(request, [row])
        raise


def report_left_out(request: PromptRequest, reason: str, count: int, mistakes: Sequence[str] = ()) -> None:
    """Report ``count`` rows that were left out.

    Arguments:
        mistakes: the mistakes of these rows, each with file and line.
    """
    if reason != EMPTY and count:
        request.filter.count_left_out(reason, count)
        for mistake in mistakes:
            request.filter.report_bad_row(mistake)


def nothing_left(request: PromptRequest, rows: int, *, bad: int) -> DataError:
    """Make the error of a request of which no prompt is left.

    Arguments:
        rows: number of rows that are not empty.
        bad: number of them that cannot be read.
    """
    if bad:
        return DataError(
            f"{request.path}: no prompt is left; {bad} rows cannot be read (--on-bad-data fail shows the first), the "
            f"other {rows - bad} prompts are longer than --rollout-max-prompt-len"
        )
    return DataError(f"{request.path}: all {rows} prompts are longer than --rollout-max-prompt-len; raise it")


def requested(run: RunView) -> PromptRequest:
    """Return the request to the data source."""
    if run.prompts is None:
        raise ValueError("a data source was made with a RunView without prompts; give it a PromptRequest")
    return run.prompts


class NumberedPrompts:
    """A data source that returns the prompts of a stream in the order of their numbers, and numbers groups and samples
    through the whole run. It returns groups that were put back again, under their old numbers.

    Arguments:
        stream: prompts by their number.
        request: the request of the run.
    """

    def __init__(self, stream: Stream, request: PromptRequest) -> None:
        self._request = request
        self._stream = stream
        size = request.n_samples_per_prompt
        self._identity = {**stream.identity(), "n_samples_per_prompt": size}
        self._next = 0
        self._returned: list[int] = []

    def __len__(self) -> int:
        return len(self._stream)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` groups: first those that were put back, then new ones."""
        returned, self._returned = self._returned[:n], self._returned[n:]
        fresh = range(self._next, self._next + n - len(returned))
        self._stream.prepare(fresh.stop)
        self._next = fresh.stop
        return [self._group(number) for number in [*returned, *fresh]]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; :meth:`next_groups` returns them first, under their old numbers, as new samples.

        Raises:
            RunError: a group has no number, or no sample, so its prompt is unknown.
        """
        self._returned.extend([_number(group) for group in groups])

    def state(self) -> dict[str, JsonValue]:
        """Return the number of the next new group, the groups that were put back, and the identity of the stream."""
        place = self._stream.state(self._returned)
        return {"next": self._next, "returned": list(self._returned), **self._identity, **place}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: prompts, seed, shuffling or group size differ from those of the state.
        """
        identity = self._identity
        differ = [
            f"{key} was {state.get(key)}, is {value}" for key, value in identity.items() if state.get(key) != value
        ]
        if differ:
            raise CheckpointError(
                f"{self._request.path}: the checkpoint was written with other prompts: {'; '.join(differ)}. Resume "
                "with the prompts and the settings of that run."
            )
        self._stream.restore(state)
        self._next, self._returned = cast(int, state["next"]), list(cast(list[int], state["returned"]))

    def _group(self, number: int) -> PromptGroup:
        """Make group ``number`` of the run; it depends on the number alone, so it can be made again."""
        row = self._stream.at(number)
        if not self._request.skips_bad:
            self._request.filter.check_prompt(row.prompt, row.metadata, row.place)
        size = self._request.n_samples_per_prompt
        return [
            Sample(
                group_index=number,
                index=number * size + i,
                prompt=_copied(row.prompt),
                label=row.label,
                metadata=_copied(row.metadata),
                multimodal_inputs=_copied(row.inputs),
            )
            for i in range(size)
        ]


def _copied(value: Any) -> Any:
    """Copy ``value`` deeply; ``copy.deepcopy`` takes seven times as long for JSON values."""
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_copied(entry) for entry in value]
    return value if value is None or type(value) in (str, int, float, bool) else copy.deepcopy(value)


def _number(group: PromptGroup) -> int:
    number = group[0].group_index if group else None
    if number is None:
        raise RunError(
            "a prompt group was put back without a group_index, by which the data source finds its prompt. Put back "
            "groups as next_groups returned them, or use a data source that buffers samples made elsewhere."
        )
    return number
