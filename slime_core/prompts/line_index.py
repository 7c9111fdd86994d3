"""Where the lines of a file begin: every 64th, as far as the file was read, or all of it from an index that is kept.
Also that files stay as they were found (``Sizes``).

The index of a 10 GB file of 1 KB lines takes 1.3 MB. It is made once, as fast as the disk reads, and kept in the user's
cache folder under the file's path, size, time of change and a digest of its beginning and end, so that a file that was
changed is indexed anew.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slime_core.errors import DataError
from slime_core.track.record import write_atomically

__all__ = ["EVERY", "LineIndex", "Sizes", "cache_folder", "indexed", "key_of", "stamp_of"]

EVERY = 64
"""Lines from one known beginning to the next; so many are read at most to come to a line between."""

BLOCK = 8 * 2**20
ENDS = 2**16
"""Bytes at the beginning and at the end of a file that its stamp is taken from."""

MARK = b"slime lines 1\n"


class LineIndex:
    """Beginnings of lines, sorted, and how far the file is known.

    Example: ``extend(64, 7000, is_end=False)`` says that line 64, counted from 0, begins at byte 7000.
    """

    def __init__(self) -> None:
        self._lines, self._offsets = array("q", [0]), array("q", [0])
        self.frontier = (0, 0)
        """Lines that are known, and where the next one begins."""
        self.is_whole = False

    def nearest(self, line: int) -> tuple[int, int]:
        """The last known line that is not behind ``line``, and where it begins."""
        place = bisect_right(self._lines, line) - 1
        return self._lines[place], self._offsets[place]

    def extend(self, line: int, offset: int, *, is_end: bool) -> None:
        """The file is known up to ``line``, which begins at ``offset`` or, with ``is_end``, is not there."""
        self.frontier, self.is_whole = (line, offset), is_end
        if not is_end:
            self._lines.append(line)
            self._offsets.append(offset)

    def forget_last(self) -> None:
        """The line that was said to begin last is not there: the file ends before it."""
        self._lines.pop()
        self._offsets.pop()

    def know(self, line: int, offset: int) -> None:
        """Take over where a line begins from somebody who knew; in the order of lines."""
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
    """Where what was found out about prompt files is kept."""
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
            # The k-th end of a line, counted from 1, is where line k begins.
            for begins in ends_N[(-lines - 1) % EVERY :: EVERY].tolist():
                index.extend(index.frontier[0] + EVERY, begins, is_end=False)
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
