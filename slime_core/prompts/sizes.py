"""Files that a run reads row by row stay as they are: what was found out about them holds to its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime_core.errors import DataError

__all__ = ["Sizes"]


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
