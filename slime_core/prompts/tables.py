"""Rows of prompt files by their number, without holding a file in memory.

    LineTable  JSON Lines; knows where every 64th line begins, as far as it was read or indexed
    Joined     several tables, and a slice, as one
    open_rows  the rows that a path names, each file read by its format

Rows are numbered from 0. A table says whether it reaches a row before it says how many it has: to count the lines of a
large file takes long, to read on does not.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import cast

from slime_core.config.prompt_paths import PromptPath, format_of, unreadable
from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptFormat, PromptTable, RawRow, RunView
from slime_core.prompts.line_index import EVERY, LineIndex, Sizes, indexed, stamp_of
from slime_core.types import JsonValue

__all__ = ["Joined", "JsonLines", "LineTable", "open_rows", "unreadable"]

AT_ONCE = 256
"""Rows that are asked of a table at once."""


class JsonLines:
    """The prompt format of JSON Lines, one object a line."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """See :class:`~slime_core.PromptFormat`; lines are found in any order alike."""
        del window
        return LineTable(path)


class LineTable:
    """The lines of a file; the last may lack its line feed.

    Raises:
        DataError: the file cannot be read; or, from any method, it has become longer or shorter since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb")
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem}. Name a JSON Lines file in UTF-8.") from problem
        weakref.finalize(self, self._stream.close)
        self._sizes = Sizes([path])
        self.index = LineIndex()

    def reaches(self, row: int) -> bool:
        """Reads on from where the file is known as far as ``row``."""
        while not self.index.is_whole and row >= self.index.frontier[0]:
            self._read_on()
        return row < self.index.frontier[0]

    def total(self) -> int:
        """The number of lines; taken from the kept index, which is made if there is none."""
        if not self.index.is_whole:
            self.index = indexed(self.path)
        return self.index.frontier[0]

    def read(self, start: int, stop: int) -> Iterator[RawRow]:
        """See :class:`~slime_core.PromptTable`; finds the beginning by the nearest line that is known."""
        line, offset = self.index.nearest(start)
        self._sizes.check()
        stream = self._stream
        stream.seek(offset)
        for _ in range(start - line):
            stream.readline()
        for number in range(start, stop):
            content = stream.readline()
            if not content:
                return
            place = stream.tell()
            yield RawRow(self.path, number + 1, content)
            stream.seek(place)  # whoever took the row may have read elsewhere

    def stamp(self) -> str:
        """See :class:`~slime_core.PromptTable`."""
        return stamp_of(self.path)

    def _read_on(self) -> None:
        line, offset = self.index.frontier
        self._sizes.check()
        self._stream.seek(offset)
        lengths = [len(content) for content in islice(self._stream_lines(), EVERY)]
        self.index.extend(line + len(lengths), offset + sum(lengths), is_end=len(lengths) < EVERY)

    def _stream_lines(self) -> Iterator[bytes]:
        return iter(self._stream.readline, b"")


class Joined:
    """The rows ``start`` to ``stop - 1`` of several tables, one after the other, numbered from 0.

    Arguments:
        stop: None: to the end.
    """

    def __init__(self, tables: Sequence[PromptTable], *, start: int = 0, stop: int | None = None) -> None:
        self.tables, self._start, self._stop = list(tables), start, stop
        self._starts = [0]
        """Of the tables whose beginning is known."""

    def reaches(self, row: int) -> bool:
        """See :class:`~slime_core.PromptTable`."""
        inside = self._stop is None or self._start + row < self._stop
        return inside and self._find(self._start + row) is not None

    def total(self) -> int:
        """See :class:`~slime_core.PromptTable`."""
        rows = sum(table.total() for table in self.tables)
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
        """One row, which there has to be."""
        return next(self.read(row, row + 1))

    @cached_property
    def stamp(self) -> str:
        """Tells these rows from others."""
        return f"{'|'.join(table.stamp() for table in self.tables)}[{self._start}:{self._stop}]"

    def places(self, rows: Sequence[int]) -> dict[str, JsonValue]:
        """What :meth:`know` needs to find ``rows`` again without reading all that stands before them."""
        found = [self._find(self._start + row) for row in rows]
        places = {(self.tables.index(table), *table.index.nearest(inner)) for table, inner in _lines(found)}
        return {"starts": list(self._starts), "places": sorted(map(list, places))}

    def know(self, places: Mapping[str, JsonValue]) -> None:
        """Take over what :meth:`places` of the same files said."""
        self._starts = list(cast(list[int], places["starts"]))
        for number, line, offset in cast(list[list[int]], places["places"]):
            table = self.tables[number]
            if isinstance(table, LineTable):
                table.index.know(line, offset)

    def _find(self, row: int) -> tuple[PromptTable, int] | None:
        """The table that holds ``row``, and the row's number in it; None: there is no such row."""
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
    """The rows that ``path`` names; see :mod:`slime_core.config.prompt_paths`.

    Arguments:
        formats: name -> how its files are read; a file of none of them is read as JSON Lines.
        window: how far from file order rows will be asked for; see :class:`~slime_core.PromptFormat`.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    where = PromptPath.read(path)
    tables = [_open(file, formats, window=window) for file in where.files(formats)]
    return Joined(tables, start=where.start, stop=where.stop)


def _open(file: Path, formats: Mapping[str, PromptFormat], *, window: int | None) -> PromptTable:
    name = format_of(file, formats)
    return LineTable(file) if name is None else formats[name].open(file, window=window)
