"""Prompts that are read as they are needed.

Rows that are left out (empty lines, prompts that are too long, invalid rows) have no number. They are found when the
stream reaches them and recorded in its state.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.provisional import PromptRequest, PromptRow
from slime_core.types import BAD, TOO_LONG
from slime_datasets.formats import open_rows
from slime_datasets.numbered import EMPTY, nothing_left, report_left_out, select_short
from slime_datasets.orders import Feistel, Windows
from slime_datasets.rows import no_rows, prompt_of

__all__ = ["Streamed"]


class Streamed:
    """Rows of files, read as they are needed.

    A *place* is the position of a row in the order of the stream, over all epochs. Prompt numbers are places without
    the left-out rows. The number of rows is known once the end was reached, or from the start for an exact shuffle,
    which needs it.

    Arguments:
        window: shuffle only within windows of this many adjacent rows; None means among all rows.

    Raises:
        DataError: a file does not exist, or the files have no rows.
    """

    def __init__(self, request: PromptRequest, *, window: int | None = None) -> None:
        self._request = request
        self._window = window
        self._rows = open_rows(request.path, window=window if request.shuffle else 0)
        self._size = self._rows.total() if request.shuffle and window is None else None
        self._seen = 0
        """Number of places examined so far."""
        self._out: dict[str, list[int]] = {TOO_LONG: [], BAD: [], EMPTY: []}
        """Reason -> places left out for this reason."""
        self._gone: list[int] = []
        """All left-out places, sorted, each minus the number of left-out places before it."""
        self._ready: dict[int, PromptRow] = {}
        self._order: tuple[int, Any] = (-1, None)
        if not self._rows.reaches(0):
            raise no_rows(request.path, self._rows.num_in_files)

    def at(self, number: int) -> PromptRow:
        """See :class:`Stream`."""
        self.prepare(number + 1)
        place = number + bisect_right(self._gone, number)
        row = self._ready.pop(place, None)
        return row or prompt_of(self._rows.row(self._row(place)), self._request)

    def prepare(self, stop: int) -> None:
        """See :class:`Stream`: examines rows until enough of them are kept."""
        start = self._seen
        while (missing := stop - (self._seen - len(self._gone))) > 0:
            self._look_at(missing)
            if self._size is not None and self._seen - start > self._size and self._has_nothing_since(start):
                raise self._nothing_left(self._size)

    def identity(self) -> dict[str, Any]:
        """See :class:`Stream`."""
        request = self._request
        order = {"seed": request.seed, "shuffle": request.shuffle, "window": self._window}
        return {"files": hashlib.sha256(self._rows.stamp.encode()).hexdigest(), **order}

    def state(self, numbers: Sequence[int]) -> dict[str, Any]:
        """See :class:`Stream`."""
        places = [number + bisect_right(self._gone, number) for number in numbers]
        near = [self._first_row(place) for place in [*places, self._seen]]
        out = {reason: list(places) for reason, places in self._out.items()}
        return {"seen": self._seen, "out": out, "rows": self._size, "known": self._rows.places(near)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Stream`."""
        self._seen, self._ready = state["seen"], {}
        self._out = {reason: list(places) for reason, places in state["out"].items()}
        places = sorted(place for places in self._out.values() for place in places)
        self._gone = [place - before for before, place in enumerate(places)]
        self._size = state["rows"] if self._size is None else self._size
        self._rows.restore(state["known"])
        for reason, places in self._out.items():
            report_left_out(self._request, reason, len([place for place in places if self._is_first(place)]))

    def __len__(self) -> int:
        """Return the number of rows of the files, including left-out rows; counts them if necessary."""
        return self._rows.total()

    def _look_at(self, count: int) -> None:
        """Read the next ``count`` places and decide which of them are left out."""
        rows: dict[int, PromptRow] = {}
        out: dict[int, str] = {}
        bad: dict[int, str] = {}
        for place in range(self._seen, self._seen + count):
            raw = self._rows.row(self._row(place))
            try:
                if raw.is_blank:
                    out[place] = EMPTY
                    continue
                rows[place] = prompt_of(raw, self._request)
            except DataError as mistake:
                if not self._request.skips_bad:
                    raise
                out[place], bad[place] = BAD, str(mistake)
        keeps = select_short(self._request, list(rows.values()))
        out |= {place: TOO_LONG for place, is_kept in zip(rows, keeps, strict=True) if not is_kept}
        self._ready |= {place: row for place, row in rows.items() if place not in out}
        self._seen += count
        for place in sorted(out):
            self._leave_out(place, out[place], [bad[place]] if place in bad else [])

    def _leave_out(self, place: int, reason: str, mistakes: Sequence[str]) -> None:
        self._out[reason].append(place)
        self._gone.append(place - len(self._gone))
        report_left_out(self._request, reason, int(self._is_first(place)), mistakes)

    def _nothing_left(self, size: int) -> DataError:
        first = {reason: sum(map(self._is_first, places)) for reason, places in self._out.items()}
        if first[EMPTY] == size:
            return no_rows(self._request.path, self._rows.num_in_files)
        return nothing_left(self._request, size - first[EMPTY], bad=first[BAD])

    def _is_first(self, place: int) -> bool:
        """Return whether the place is in the first epoch; rows left out again in later epochs are not reported."""
        return self._size is None or place < self._size

    def _has_nothing_since(self, start: int) -> bool:
        return self._seen - start == sum(start <= place for places in self._out.values() for place in places)

    def _row(self, place: int) -> int:
        """Return the row at ``place``."""
        epoch, inner = self._epoch(place)
        if not self._request.shuffle:
            return inner
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        order = self._order[1]
        if isinstance(order, Feistel):
            return order(inner)
        _, stop = order.window(inner)
        if self._size is None and not self._rows.reaches(stop - 1):
            self._size = self._rows.total()
        return int(order.row(inner, stop if self._size is None else self._size))

    def _epoch(self, place: int) -> tuple[int, int]:
        if self._size is None and not self._rows.reaches(place):
            self._size = self._rows.total()
        return divmod(place, self._size) if self._size is not None else (0, place)

    def _first_row(self, place: int) -> int:
        """Return a row at or before all rows that the stream reads from ``place`` on."""
        _, inner = self._epoch(place)
        width = self._window if self._request.shuffle else None
        return inner - inner % width if width else inner

    def _shuffled(self, epoch: int) -> Feistel | Windows:
        key = f"{self._request.seed}:{epoch}"
        if self._window is not None:
            return Windows(self._window, key)
        return Feistel(self._rows.total(), key)
