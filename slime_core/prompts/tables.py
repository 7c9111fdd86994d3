"""Rows of prompt files by their number, without holding a file in memory.

:class:`LineIndex` knows where every 64th line of a file starts: as far as the file was read, or all of it from an index
that is kept in the user's cache. :class:`Sizes` checks that files stay as they were found.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import cast

from slime_core.config.prompt_paths import PromptPath, format_of, unreadable
from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptFormat, PromptTable, RawRow, RunView
from slime_core.track.record import write_atomically
from slime_core.types import JsonValue
from slime_core.untrusted import open_regular

__all__ = [
    "EVERY",
    "Joined",
    "JsonLines",
    "LineIndex",
    "LineTable",
    "Sizes",
    "cache_folder",
    "indexed",
    "key_of",
    "open_rows",
    "stamp_of",
    "unreadable",
]


EVERY = 64
"""Lines from one known beginning to the next; so many are read at most to come to a line between."""

BLOCK = 8 * 2**20
ENDS = 2**16
"""Bytes at the beginning and at the end of a file that its stamp is taken from."""

MARK = b"slime lines 1\n"


class LineIndex:
    """Offsets at which lines start, sorted, and how far the file has been read.

    Example: ``extend(64, 7000, is_end=False)`` says that line 64, counted from 0, starts at byte 7000.
    """

    def __init__(self) -> None:
        self._lines = array("q", [0])
        self._offsets = array("q", [0])
        self.frontier = (0, 0)
        """Lines that are known, and where the next one starts."""
        self.is_whole = False

    def nearest(self, line: int) -> tuple[int, int]:
        """The last known line at or before ``line``, and where it starts."""
        place = bisect_right(self._lines, line) - 1
        return self._lines[place], self._offsets[place]

    def extend(self, line: int, offset: int, *, is_end: bool) -> None:
        """The file is known up to ``line``, which starts at ``offset`` or, with ``is_end``, is not there."""
        self.frontier, self.is_whole = (line, offset), is_end
        if not is_end:
            self._lines.append(line)
            self._offsets.append(offset)

    def forget_last(self) -> None:
        """Remove the line that was added last: the file ends before it."""
        self._lines.pop()
        self._offsets.pop()

    def know(self, line: int, offset: int) -> None:
        """Add a line whose offset is known from an earlier run; in the order of lines."""
        if line > self.frontier[0]:
            self.extend(line, offset, is_end=False)

    def to_bytes(self) -> bytes:
        """A whole index, for :meth:`from_bytes`."""
        return MARK + array("q", [*self.frontier]).tobytes() + self._offsets.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> LineIndex:
        """The index that :meth:`to_bytes` of a file that was indexed in one go gave.

        Raises:
            ValueError: ``content`` is something else.
        """
        numbers = array("q")
        if not content.startswith(MARK):
            raise ValueError("no index of lines")
        numbers.frombytes(content[len(MARK) :])
        found = cls()
        found._offsets = numbers[2:]
        found._lines = array("q", range(0, EVERY * len(found._offsets), EVERY))
        found.frontier, found.is_whole = (numbers[0], numbers[1]), True
        if not numbers[1:] or -(-max(found.frontier[0], 1) // EVERY) != len(found._offsets):
            raise ValueError("an index of lines that is cut short")
        return found


def indexed(path: Path) -> LineIndex:
    """The whole index of ``path``: the one that is kept, or a new one, which is kept from then on."""
    kept = cache_folder() / f"{key_of(path)}.lines"
    with suppress(OSError, ValueError):
        return LineIndex.from_bytes(kept.read_bytes())
    made = _made(path)
    with suppress(OSError):  # a cache may fail
        write_atomically(kept, made.to_bytes())
    return made


def cache_folder() -> Path:
    """The folder of cached indexes of prompt files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "slime" / "prompts"


def stamp_of(path: Path) -> str:
    """Size of the file and SHA-256 of its first and last 64 KiB; the same wherever the file lies."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as stream:
        digest.update(stream.read(ENDS))
        stream.seek(max(0, size - ENDS))
        digest.update(stream.read(ENDS))
    return f"{size}:{digest.hexdigest()[:32]}"


def key_of(path: Path) -> str:
    """Names this content of the file at this place."""
    named = f"{os.path.abspath(path)}:{path.stat().st_mtime_ns}:{stamp_of(path)}"
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def _made(path: Path) -> LineIndex:
    """One pass over the file."""
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
        index.forget_last()
    index.extend(lines + (offset > last), offset, is_end=True)
    return index


class Sizes:
    """How many bytes files had when they were opened.

    Rows of a file that changes have no numbers, no resumed run would find its place in it, and what is mapped into
    memory and then cut ends the process that touches it.

    Raises:
        OSError: a file is not there.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._sizes = {file: file.stat().st_size for file in files}

    def check(self) -> None:
        """Returns if they have as many now, or are gone: what is open can still be read.

        Raises:
            DataError: one has become longer or shorter.
        """
        for file, before in self._sizes.items():
            now = _size_of(file, before)
            if now != before:
                raise DataError(
                    f"{file} had {before:,} bytes when this run opened it, and has {now:,} now. Put it back as it was "
                    "and resume from the last checkpoint; write further rows to another file"
                )


def _size_of(file: Path, before: int) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return before


AT_ONCE = 256
"""Rows that are read from a table at once."""


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
            self._stream = open_regular(path)
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
            stream.seek(place)  # the consumer of the row may have moved the stream

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
        self.tables = list(tables)
        self._start = start
        self._stop = stop
        self._starts = [0]
        """First row of each table, as far as known."""

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
        """A text that differs where the rows differ."""
        return f"{'|'.join(table.stamp() for table in self.tables)}[{self._start}:{self._stop}]"

    def places(self, rows: Sequence[int]) -> dict[str, JsonValue]:
        """State from which :meth:`know` finds ``rows`` again without reading the rows before them."""
        found = [self._find(self._start + row) for row in rows]
        places = {(self.tables.index(table), *table.index.nearest(inner)) for table, inner in _lines(found)}
        return {"starts": list(self._starts), "places": sorted(map(list, places))}

    def know(self, places: Mapping[str, JsonValue]) -> None:
        """Take over the result of :meth:`places` for the same files."""
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
        window: how far from file order rows will be read; see :class:`~slime_core.PromptFormat`.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    where = PromptPath.read(path)
    tables = [_open(file, formats, window=window) for file in where.files(formats)]
    return Joined(tables, start=where.start, stop=where.stop)


def _open(file: Path, formats: Mapping[str, PromptFormat], *, window: int | None) -> PromptTable:
    name = format_of(file, formats)
    return LineTable(file) if name is None else formats[name].open(file, window=window)
