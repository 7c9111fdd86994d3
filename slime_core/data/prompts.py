"""The built-in data source: prompt groups from a file, in an order that a seed and a cursor determine."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.data.rows import PromptRow, read_prompts
from slime_core.errors import CheckpointError, DataError, RunError
from slime_core.plugins.contracts import PromptRequest
from slime_core.types import PromptGroup, Sample

__all__ = ["PromptFiles"]


class PromptFiles:
    """Hands out every prompt once an epoch; numbers groups and samples through the whole run.

    Arguments:
        options: the built-in plugin has none.
        request: see :class:`PromptRequest`.

    Raises:
        DataError: the file is missing, empty or malformed.
    """

    def __init__(self, options: object | None = None, *, request: PromptRequest) -> None:
        del options
        self._request = request
        rows = read_prompts(
            request.path, input_key=request.input_key, label_key=request.label_key, metadata_key=request.metadata_key
        )
        self._rows = [row for row in rows if request.keeps is None or request.keeps(row.prompt)]
        if not self._rows:
            raise DataError(
                f"{request.path}: all {len(rows)} prompts are longer than --rollout-max-prompt-len; raise it"
            )
        self._order_comes_from = {
            "prompts": len(self._rows),
            "digest": _digest(self._rows),
            "seed": request.seed,
            "shuffle": request.shuffle,
            "n_samples_per_prompt": request.n_samples_per_prompt,
        }
        self._next = 0
        self._returned: list[int] = []
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that were put back first, then new ones."""
        again, self._returned = self._returned[:n], self._returned[n:]
        fresh = range(self._next, self._next + n - len(again))
        self._next = fresh.stop
        return [self._group(number) for number in [*again, *fresh]]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; they are handed out first, under their old numbers, as new samples.

        Raises:
            RunError: a group has no number, or no sample, so that nothing says which prompt it is of.
        """
        self._returned.extend([_number(group) for group in groups])

    def state(self) -> dict[str, Any]:
        """The number of the next new group, the groups that were put back, and all that decides what a number means."""
        return {"next": self._next, "returned": list(self._returned), **self._order_comes_from}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state()`` was taken.

        Raises:
            CheckpointError: prompts, seed, shuffling or group size are others than when the state was taken.
        """
        found = self._order_comes_from
        differ = [f"{key} was {state.get(key)}, is {value}" for key, value in found.items() if state.get(key) != value]
        if differ:
            raise CheckpointError(
                f"{self._request.path}: the checkpoint's place in the data would mean other prompts: "
                f"{'; '.join(differ)}. Resume with the prompts and the settings of that run."
            )
        self._next, self._returned = int(state["next"]), list(state["returned"])

    def _group(self, number: int) -> PromptGroup:
        """Group ``number`` of the run; the number alone says which prompt, so that it can be made again."""
        epoch, position = divmod(number, len(self._rows))
        row = self._rows[self._order(epoch)[position]]
        size = self._request.n_samples_per_prompt
        return [
            Sample(
                group_index=number,
                index=number * size + i,
                prompt=copy.deepcopy(row.prompt),
                label=row.label,
                metadata=copy.deepcopy(row.metadata),
            )
            for i in range(size)
        ]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._rows)))
            if self._request.shuffle:
                # A string seeds by its bytes: the same order on every machine and Python version.
                random.Random(f"{self._request.seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._orders[epoch]


def _number(group: PromptGroup) -> int:
    number = group[0].group_index if group else None
    if number is None:
        raise RunError(
            f"a prompt group was put back {'whose group_index is None' if group else 'that has no sample'}; the data "
            "source finds its prompt by that number. Put back groups of samples as next_groups handed them out, or "
            "use a data source with a buffer of its own for samples made elsewhere."
        )
    return number


def _digest(rows: Sequence[PromptRow]) -> str:
    """SHA-256 of prompts and labels in file order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.prompt, row.label]).encode() + b"\n")
    return digest.hexdigest()
