"""How prompt files of one format are read: the format, a file of it that is open, and a row that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["PromptFormat", "PromptTable", "RawRow"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file holds it.

    Example: ``RawRow(Path("a.parquet"), 3, {"prompt": "2+2", "label": "4"})``.

    Arguments:
        file: that holds it.
        number: from 1.
        content: field -> value; or, of a text file, the bytes of a line that is a JSON object.
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
        """Whether it is an empty line."""
        return isinstance(self.content, bytes) and not self.line.strip()

    @property
    def line(self) -> bytes:
        """The bytes of a line, without the byte order mark that a file may begin with; empty for fields."""
        found = self.content if isinstance(self.content, bytes) else b""
        return found.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else found


class PromptTable(Protocol):
    """The rows of one file, numbered from 0 in the order of the file; read as they are needed.

    The file must not change while it is open: a method raises a DataError where it finds that it did.
    """

    def reaches(self, row: int) -> bool:
        """Whether there is a row ``row``; reads no further than that."""
        ...

    def total(self) -> int:
        """How many rows there are; may take as long as reading the whole file."""
        ...

    def read(self, start: int, stop: int) -> Iterator[RawRow]:
        """Rows ``start`` to ``stop - 1``, as far as there are; of any part of the file, any number of times.

        Raises:
            DataError: the file is not what its format says; names file and row.
        """
        ...

    def stamp(self) -> str:
        """Tells this content from another, wherever the file lies; resuming a run compares it."""
        ...


class PromptFormat(Protocol):
    """Opens prompt files of one format, for training and evaluation alike.

    A component's name is the suffix of its files, without the dot (``parquet``); or the name of a file that marks a
    folder of the format, which has a dot (``state.json``).
    """

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """The rows of a file, or of a folder; reads as little as it can.

        Arguments:
            window: how far from file order rows will be asked for. 0: in file order; N: in any order among N
                neighbours, then among the next N; None: in any order among all.

        Raises:
            DataError: it cannot be read; names the file, and says what to do.
        """
        ...
