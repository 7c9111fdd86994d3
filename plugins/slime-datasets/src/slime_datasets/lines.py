"""JSON Lines as a table: an index of line starts finds lines by number.

The index has the offset of every 64th line. It grows as the file is read; a whole index is kept in the user's cache, so
that later runs shuffle all rows without reading the file first.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from slime_core.errors import DataError
from slime_datasets.tables import Row, Sizes, stamp_of

__all__ = ["EVERY", "LineIndex", "LineTable", "cache_folder", "indexed", "key_of"]

EVERY = 64
"""Lines between two indexed offsets; at most so many are read to reach a line."""

BLOCK = 8 * 2**20
MARK = b"slime lines 1\n"


class LineIndex:
    """Sorted ``offsets`` at which ``lines`` start, and how far the file has been read.

    Example: after ``extend(64, 7000, is_end=False)``, line 64, counted from 0, starts at byte 7000.
    """

    def __init__(self) -> None:
        self.lines = array("q", [0])
        self.offsets = array("q", [0])
        self.frontier = (0, 0)
        """Number of lines that were read, and the offset of the next line."""
        self.is_whole = False

    def nearest(self, line: int) -> tuple[int, int]:
        """Return the last indexed line at or before ``line``, and its offset."""
        place = bisect_right(self.lines, line) - 1
        return self.lines[place], self.offsets[place]

    def extend(self, line: int, offset: int, *, is_end: bool) -> None:
        """Record that the file was read up to ``line``, which starts at ``offset``; ``is_end``: the file ends there."""
        self.frontier, self.is_whole = (line, offset), is_end
        if not is_end:
            self.lines.append(line)
            self.offsets.append(offset)


class LineTable:
    """The lines of a file; the last may lack its line feed.

    Raises:
        DataError: the file cannot be read; from any method: the file has become longer or shorter.
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
        """See :class:`~slime_datasets.tables.Table`; indexes the file up to ``row``."""
        while not self.index.is_whole and row >= self.index.frontier[0]:
            self._read_on()
        return row < self.index.frontier[0]

    def total(self) -> int:
        """See :class:`~slime_datasets.tables.Table`; creates the whole index if it does not exist."""
        if not self.index.is_whole:
            self.index = indexed(self.path)
        return self.index.frontier[0]

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """See :class:`~slime_datasets.tables.Table`; starts from the nearest indexed line."""
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
            yield Row(self.path, number + 1, content)
            stream.seek(place)  # the consumer of the row may have moved the stream

    def stamp(self) -> str:
        """See :class:`~slime_datasets.tables.Table`."""
        return stamp_of(self.path)

    def locate(self, row: int) -> list[int]:
        """See :class:`~slime_datasets.tables.Table`: an indexed line and its offset."""
        return list(self.index.nearest(row))

    def skip_to(self, place: Sequence[int]) -> None:
        """See :class:`~slime_datasets.tables.Table`; a place that the index has passed already changes nothing."""
        line, offset = place
        if line > self.index.frontier[0]:
            self.index.extend(line, offset, is_end=False)

    def _read_on(self) -> None:
        line, offset = self.index.frontier
        self._sizes.check()
        self._stream.seek(offset)
        lengths = [len(content) for content in islice(iter(self._stream.readline, b""), EVERY)]
        self.index.extend(line + len(lengths), offset + sum(lengths), is_end=len(lengths) < EVERY)


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
    index = LineIndex()
    index.offsets = numbers[2:]
    index.lines = array("q", range(0, EVERY * len(index.offsets), EVERY))
    index.frontier, index.is_whole = (numbers[0], numbers[1]), True
    if not numbers[1:] or -(-max(index.frontier[0], 1) // EVERY) != len(index.offsets):
        raise ValueError("an index of lines that is cut short")
    return index


def indexed(path: Path) -> LineIndex:
    """Return the whole index of ``path``: from the cache, or a new index, which is then cached."""
    cached = cache_folder() / f"{key_of(path)}.lines"
    with suppress(OSError, ValueError):
        return from_bytes(cached.read_bytes())
    index = _index_file(path)
    draft = cached.with_suffix(f".{os.getpid()}")
    with suppress(OSError):  # a cache may fail
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(to_bytes(index))
        draft.replace(cached)
    return index


def cache_folder() -> Path:
    """Return the folder of cached indexes and copies of prompt files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "slime" / "prompts"


def key_of(path: Path) -> str:
    """Return a name for the present content of the file at this path."""
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
