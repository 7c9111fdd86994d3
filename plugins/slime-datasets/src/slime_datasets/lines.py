"""Rows of prompt files in any order: lines by an index in the user's cache, and the rows of several files
under one numbering.

An index knows where every 64th line of a file starts, so that a shuffle over all rows starts at once when it is there.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import cast

from slime_core import PromptFormat, PromptTable, RawRow
from slime_core.prompts.rows import AT_ONCE, EVERY, LineIndex, LineTable, open_tables, stamp_of
from slime_core.types import JsonValue

__all__ = ["IndexedLines", "Joined", "cache_folder", "indexed", "key_of", "open_rows"]

BLOCK = 8 * 2**20
MARK = b"slime lines 1\n"


class IndexedLines(LineTable):
    """The lines of a file, with the cached index."""

    def total(self) -> int:
        """Return the number of lines; create the index if it does not exist."""
        if not self.index.is_whole:
            self.index = indexed(self.path)
        return self.index.frontier[0]


def to_bytes(index: LineIndex) -> bytes:
    """Convert a whole index to bytes; :func:`from_bytes` is the inverse."""
    return MARK + array("q", [*index.frontier]).tobytes() + index.offsets.tobytes()


def from_bytes(content: bytes) -> LineIndex:
    """Convert the bytes of :func:`to_bytes` back to an index.

    Raises:
        ValueError: ``content`` is something else.
    """
    numbers = array("q")
    if not content.startswith(MARK):
        raise ValueError("no index of lines")
    numbers.frombytes(content[len(MARK) :])
    found = LineIndex()
    found.offsets = numbers[2:]
    found.lines = array("q", range(0, EVERY * len(found.offsets), EVERY))
    found.frontier, found.is_whole = (numbers[0], numbers[1]), True
    if not numbers[1:] or -(-max(found.frontier[0], 1) // EVERY) != len(found.offsets):
        raise ValueError("an index of lines that is cut short")
    return found


def indexed(path: Path) -> LineIndex:
    """Return the whole index of ``path``: from the cache, or a new index, which is then cached."""
    kept = cache_folder() / f"{key_of(path)}.lines"
    with suppress(OSError, ValueError):
        return from_bytes(kept.read_bytes())
    made = _index_file(path)
    draft = kept.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a cache may fail
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(to_bytes(made))
        draft.replace(kept)
    return made


def cache_folder() -> Path:
    """Return the folder of cached indexes of prompt files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "slime" / "prompts"


def key_of(path: Path) -> str:
    """Return a name for this content of the file at this path."""
    named = f"{os.path.abspath(path)}:{path.stat().st_mtime_ns}:{stamp_of(path)}"
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def _index_file(path: Path) -> LineIndex:
    """Index the file in one pass."""
    import numpy as np

    index = LineIndex()
    lines = offset = last = 0
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            ends_N = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset + 1
            # The k-th end of a line, counted from 1, is where line k starts.
            for start_offset in ends_N[(-lines - 1) % EVERY :: EVERY].tolist():
                index.extend(index.frontier[0] + EVERY, start_offset, is_end=False)
            lines += len(ends_N)
            last = int(ends_N[-1]) if len(ends_N) else last
            offset += len(block)
    if index.frontier == (lines, offset) and lines:
        index.lines.pop()  # the file ends before it
        index.offsets.pop()
    index.extend(lines + (offset > last), offset, is_end=True)
    return index


class Joined:
    """The rows ``start`` to ``stop - 1`` of several tables, one after the other, numbered from 0.

    Arguments:
        stop: None: to the end.
    """

    def __init__(self, tables: Sequence[PromptTable], *, start: int = 0, stop: int | None = None) -> None:
        self.tables = list(tables)
        self._start = start
        self._stop = stop
        self._starts = [0]
        """First row of each table, as far as known."""

    def reaches(self, row: int) -> bool:
        """See :class:`~slime_core.PromptTable`."""
        inside = self._stop is None or self._start + row < self._stop
        return inside and self._find(self._start + row) is not None

    @property
    def num_in_files(self) -> int:
        """Return the number of rows of all tables, including those outside ``start`` and ``stop``."""
        return sum(table.total() for table in self.tables)

    def total(self) -> int:
        """See :class:`~slime_core.PromptTable`."""
        rows = self.num_in_files
        return max(0, min(rows, rows if self._stop is None else self._stop) - self._start)

    def read(self, start: int, stop: int | None = None) -> Iterator[RawRow]:
        """See :class:`~slime_core.PromptTable`; ``stop`` None: to the end."""
        ends = [end for end in (self._stop, None if stop is None else self._start + stop) if end is not None]
        row, end = self._start + start, min(ends, default=None)
        while (end is None or row < end) and (found := self._find(row)) is not None:
            table, inner = found
            last = inner + AT_ONCE if end is None else min(inner + AT_ONCE, inner + end - row)
            for raw in table.read(inner, last):
                row += 1
                yield raw

    def row(self, row: int) -> RawRow:
        """Return one row, which must exist."""
        return next(self.read(row, row + 1))

    @cached_property
    def stamp(self) -> str:
        """Return a text that differs if the rows differ."""
        return f"{'|'.join(table.stamp() for table in self.tables)}[{self._start}:{self._stop}]"

    def places(self, rows: Sequence[int]) -> dict[str, JsonValue]:
        """Return state from which :meth:`know` finds ``rows`` again without reading the rows before them."""
        found = [self._find(self._start + row) for row in rows]
        places = {(self.tables.index(table), *table.index.nearest(inner)) for table, inner in _lines(found)}
        return {"starts": list(self._starts), "places": sorted(map(list, places))}

    def know(self, places: Mapping[str, JsonValue]) -> None:
        """Take over the result of :meth:`places` for the same files."""
        self._starts = list(cast(list[int], places["starts"]))
        for number, line, offset in cast(list[list[int]], places["places"]):
            table = self.tables[number]
            # In the order of lines; what the table knows further on already stays.
            if isinstance(table, LineTable) and line > table.index.frontier[0]:
                table.index.extend(line, offset, is_end=False)

    def _find(self, row: int) -> tuple[PromptTable, int] | None:
        """Return the table that holds ``row`` and the row's number in it; None: there is no such row."""
        number = bisect_right(self._starts, row) - 1
        while number < len(self.tables):
            table, inner = self.tables[number], row - self._starts[number]
            if table.reaches(inner):
                return table, inner
            number += 1
            if number == len(self._starts):
                self._starts.append(self._starts[-1] + table.total())
        return None


def _lines(found: Sequence[tuple[PromptTable, int] | None]) -> Iterator[tuple[LineTable, int]]:
    for each in found:
        if each is not None and isinstance(each[0], LineTable):
            yield each[0], each[1]


def open_rows(path: Path, formats: Mapping[str, PromptFormat], *, window: int | None = 0) -> Joined:
    """Open the rows that ``path`` names; arguments and errors as of :func:`slime_core.prompts.rows.open_tables`."""
    where, tables = open_tables(path, formats, window=window, lines=IndexedLines)
    return Joined(tables, start=where.start, stop=where.stop)
