"""Prompts that are all held in memory."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence

from slime_core.plugins.contracts import PromptRequest
from slime_core.prompts.left_out import BAD, TOO_LONG, kept, nothing_left, reading_of, tell
from slime_core.prompts.rows import PromptRow, numbered_prompts
from slime_core.types import JsonValue

__all__ = ["Held"]


class Held:
    """Every row in memory, and the order of one epoch."""

    def __init__(self, request: PromptRequest) -> None:
        self._request = request
        bad: list[str] = []
        found = list(numbered_prompts(request.path, reading_of(request), bad=bad if request.skips_bad else None))
        rows = [row for _, row in found]
        keeps = kept(request, rows, [raw.place for raw, _ in found])
        self._rows = [row for row, is_kept in zip(rows, keeps, strict=True) if is_kept]
        tell(request, TOO_LONG, len(rows) - len(self._rows))
        tell(request, BAD, len(bad), bad)
        if not self._rows:
            raise nothing_left(request, len(rows) + len(bad), bad=len(bad))
        self._orders: dict[int, list[int]] = {}

    def at(self, number: int) -> PromptRow:
        """See :class:`Stream`."""
        epoch, place = divmod(number, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def prepare(self, stop: int) -> None:
        """Everything is there."""

    def identity(self) -> dict[str, JsonValue]:
        """See :class:`Stream`."""
        seed, shuffle = self._request.seed, self._request.shuffle
        return {"prompts": len(self._rows), "digest": _digest(self._rows), "seed": seed, "shuffle": shuffle}

    def state(self, numbers: Sequence[int]) -> dict[str, JsonValue]:
        """Nothing: the files say it all."""
        del numbers
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Nothing to take over."""

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


def _digest(rows: Sequence[PromptRow]) -> str:
    """SHA-256 of prompts and labels in file order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.prompt, row.label], default=str).encode() + b"\n")
    return digest.hexdigest()
