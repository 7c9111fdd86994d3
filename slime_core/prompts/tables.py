"""Rows of prompt files by their number, without holding a file in memory.

:class:`LineIndex` knows where every 64th line of a file starts, as far as the file was read. :class:`Sizes` checks that
files stay as they were found. Plugin ``datasets`` keeps indexes, and reads rows in any order.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from slime_core.config.prompt_paths import JSON_LINES, PromptPath, format_of, unreadable
from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptFormat, PromptTable, RawRow, RunView
from slime_core.untrusted import open_regular

__all__ = [
    "AT_ONCE",
    "EVERY",
    "JsonLines",
    "LineIndex",
    "LineTable",
    "Sizes",
    "open_tables",
    "rows_in_order",
    "stamp_of",
    "unreadable",
]


EVERY = 64
"""Lines from one known beginning to the next; so many are read at most to come to a line between."""

ENDS = 2**16
"""Bytes at the beginning and at the end of a file that its stamp is taken from."""


class LineIndex:
    """``offsets`` at which ``lines`` start, sorted, and how far the file has been read.

    Example: ``extend(64, 7000, is_end=False)`` says that line 64, counted from 0, starts at byte 7000.
    """

    def __init__(self) -> None:
        self.lines = array("q", [0])
        self.offsets = array("q", [0])
        self.frontier = (0, 0)
        """Lines that are known, and where the next one starts."""
        self.is_whole = False

    def nearest(self, line: int) -> tuple[int, int]:
        """The last known line at or before ``line``, and where it starts."""
        place = bisect_right(self.lines, line) - 1
        return self.lines[place], self.offsets[place]

    def extend(self, line: int, offset: int, *, is_end: bool) -> None:
        """The file is known up to ``line``, which starts at ``offset`` or, with ``is_end``, is not there."""
        self.frontier, self.is_whole = (line, offset), is_end
        if not is_end:
            self.lines.append(line)
            self.offsets.append(offset)


def stamp_of(path: Path) -> str:
    """Size of the file and SHA-256 of its first and last 64 KiB; the same wherever the file lies."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as stream:
        digest.update(stream.read(ENDS))
        stream.seek(max(0, size - ENDS))
        digest.update(stream.read(ENDS))
    return f"{size}:{digest.hexdigest()[:32]}"


class Sizes:
    """Sizes of files in bytes when they were opened.

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
        """The number of lines; reads the file to its end."""
        self.reaches(sys.maxsize)
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


def open_tables(
    path: Path,
    formats: Mapping[str, PromptFormat],
    *,
    window: int | None = 0,
    lines: Callable[[Path], PromptTable] = LineTable,
) -> tuple[PromptPath, list[PromptTable]]:
    """The files that ``path`` names, and which of their rows it means; see :mod:`slime_core.config.prompt_paths`.

    Arguments:
        formats: name -> how its files are read; a file of none of them is read as JSON Lines.
        window: how far from file order rows will be read; see :class:`~slime_core.PromptFormat`.
        lines: opens JSON Lines.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    where = PromptPath.read(path)
    named = [(file, format_of(file, formats)) for file in where.files(formats)]
    return where, [
        lines(file) if name is None or name in JSON_LINES else formats[name].open(file, window=window)
        for file, name in named
    ]


def rows_in_order(where: PromptPath, tables: Iterable[PromptTable]) -> Iterator[RawRow]:
    """The rows that ``where`` means, one file after the other."""
    stop = None if where.stop is None else where.stop - where.start
    return islice(_rows_from(where.start, tables), stop)


def _rows_from(start: int, tables: Iterable[PromptTable]) -> Iterator[RawRow]:
    for table in tables:
        if not table.reaches(start):
            start -= table.total()
            continue
        while table.reaches(start):
            yield from table.read(start, start + AT_ONCE)
            start += AT_ONCE
        start = 0
