"""A row of a prompt file before anyone has looked into it, and what every kind of file can be asked for rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["BYTE_ORDER_MARK", "Raw", "Table"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Raw:
    """One row as its file holds it.

    Arguments:
        file: where it stands.
        number: from 1.
        content: the bytes of a line, or a row of columns.
    """

    file: Path
    number: int
    content: bytes | dict[str, Any]

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.file}, {'line' if isinstance(self.content, bytes) else 'row'} {self.number}"

    @property
    def is_blank(self) -> bool:
        """Whether it is an empty line."""
        return isinstance(self.content, bytes) and not self.line.strip()

    @property
    def line(self) -> bytes:
        """The bytes of a line, without the byte order mark that a file may begin with; none of columns."""
        found = self.content if isinstance(self.content, bytes) else b""
        return found.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else found


class Table(Protocol):
    """Rows of one file."""

    def reaches(self, row: int) -> bool:
        """Whether there is a row ``row``."""
        ...

    def total(self) -> int:
        """How many rows there are; may take as long as reading them."""
        ...

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """Rows ``start`` to ``stop - 1``, as far as there are."""
        ...

    def stamp(self) -> str:
        """Tells this content from another by its size, beginning and end."""
        ...
