"""Rows of prompt files by number, without holding a file in memory.

Row    one row as its file holds it
Table  the rows of one file: JSON Lines (:mod:`slime_datasets.lines`), Parquet and Arrow (``columnar``)
Sizes  checks that files do not change during a run
Rows   the rows of several tables under one numbering
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from slime_core.errors import DataError

__all__ = ["Row", "Rows", "Sizes", "Table", "stamp_of"]

AT_ONCE = 256
"""Rows that are read from a table at once."""

ENDS = 2**16
"""Bytes at the start and at the end of a file that its stamp covers."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row as its file holds it.

    Example: ``Row(Path("a.parquet"), 3, {"prompt": "2+2", "label": "4"})``.

    Arguments:
        number: of the row in its file, from 1.
        content: field -> value; of a text file, the bytes of a line.
    """

    file: Path
    number: int
    content: bytes | Mapping[str, object]

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, {'line' if isinstance(self.content, bytes) else 'row'} {self.number}"

    @property
    def is_blank(self) -> bool:
        """True if it is an empty line."""
        return isinstance(self.content, bytes) and not self.line.strip()

    @property
    def line(self) -> bytes:
        """The bytes of a line, without the byte order mark that a file may start with; empty for fields."""
        line = self.content if isinstance(self.content, bytes) else b""
        return line.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else line


class Table(Protocol):
    """The rows of one file, numbered from 0 in the order of the file and read as they are needed.

    Methods raise DataError if the file changed while it was open.
    """

    def reaches(self, row: int) -> bool:
        """Return whether there is a row ``row``; reads no further than that."""
        ...

    def total(self) -> int:
        """Return the number of rows; may read the whole file."""
        ...

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """Yield the existing rows among ``start`` to ``stop - 1``.

        Raises:
            DataError: the file is not what its format says; names file and row.
        """
        ...

    def stamp(self) -> str:
        """Return a text that differs if the content differs, wherever the file lies; a resumed run compares it."""
        ...

    def locate(self, row: int) -> list[int]:
        """Return a place at or before ``row`` for :meth:`skip_to`; empty: the table finds every row fast."""
        ...

    def skip_to(self, place: Sequence[int]) -> None:
        """Find rows after ``place`` without reading those before it."""
        ...


def stamp_of(path: Path) -> str:
    """Return the size of the file and the SHA-256 of its first and last 64 KiB; independent of the path."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as stream:
        digest.update(stream.read(ENDS))
        stream.seek(max(0, size - ENDS))
        digest.update(stream.read(ENDS))
    return f"{size}:{digest.hexdigest()[:32]}"


class Sizes:
    """Sizes of files in bytes when they were opened.

    A file that changes has no stable row numbers, so a resumed run could not find its place in it; and reading a
    memory-mapped file that was truncated kills the process.

    Raises:
        OSError: a file does not exist.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._sizes = {file: file.stat().st_size for file in files}

    def check(self) -> None:
        """Raise DataError if a file has become longer or shorter. A deleted file passes: it is open and can be read."""
        for file, before in self._sizes.items():
            now = before
            with suppress(OSError):
                now = file.stat().st_size
            if now != before:
                raise DataError(
                    f"{file} had {before:,} bytes when this run opened it, and has {now:,} now. Restore the file and "
                    "resume from the last checkpoint; write new rows to another file"
                )


class Rows:
    """The rows ``start`` to ``stop - 1`` of several tables, one after the other, numbered from 0.

    Arguments:
        stop: None: to the end.
    """

    def __init__(self, tables: Sequence[Table], *, start: int = 0, stop: int | None = None) -> None:
        self._tables = list(tables)
        self._start = start
        self._stop = stop
        self._starts = [0]
        """First row of each table, as far as known."""

    def reaches(self, row: int) -> bool:
        """Return whether there is a row ``row``."""
        inside = self._stop is None or self._start + row < self._stop
        return inside and self._find(self._start + row) is not None

    @property
    def num_in_files(self) -> int:
        """Number of rows of all tables, including those outside ``start`` and ``stop``."""
        return sum(table.total() for table in self._tables)

    def total(self) -> int:
        """Return the number of rows; may read whole files."""
        rows = self.num_in_files
        return max(0, min(rows, rows if self._stop is None else self._stop) - self._start)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """Yield the rows ``start`` to ``stop - 1``; ``stop`` None: to the end."""
        ends = [end for end in (self._stop, None if stop is None else self._start + stop) if end is not None]
        row, end = self._start + start, min(ends, default=None)
        while (end is None or row < end) and (match := self._find(row)) is not None:
            number, inner = match
            last = inner + AT_ONCE if end is None else min(inner + AT_ONCE, inner + end - row)
            for raw in self._tables[number].read(inner, last):
                row += 1
                yield raw

    def row(self, row: int) -> Row:
        """Return one row, which must exist."""
        return next(self.read(row, row + 1))

    @cached_property
    def stamp(self) -> str:
        """A text that differs if the rows differ."""
        return f"{'|'.join(table.stamp() for table in self._tables)}[{self._start}:{self._stop}]"

    def places(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return state with which :meth:`restore` finds ``rows`` again without reading the rows before them."""
        matches = [match for row in rows if (match := self._find(self._start + row)) is not None]
        places = {(number, *self._tables[number].locate(inner)) for number, inner in matches}
        return {"starts": list(self._starts), "places": sorted(list(place) for place in places if len(place) > 1)}

    def restore(self, places: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`places` for the same files."""
        self._starts = list(places["starts"])
        for number, *place in places["places"]:
            self._tables[number].skip_to(place)

    def _find(self, row: int) -> tuple[int, int] | None:
        """Return the number of the table that holds ``row``, and the row's number in it; None if no table does."""
        number = bisect_right(self._starts, row) - 1
        while number < len(self._tables):
            inner = row - self._starts[number]
            if self._tables[number].reaches(inner):
                return number, inner
            number += 1
            if number == len(self._starts):
                self._starts.append(self._starts[-1] + self._tables[number - 1].total())
        return None
