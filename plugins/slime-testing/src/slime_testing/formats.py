"""The suite of prompt formats: rows by number in any order, and errors for files of another format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st

from slime_core import PromptTable
from slime_core.errors import DataError
from slime_core.prompts.rows import content_of
from slime_testing.harness import Kind
from slime_testing.suite import ComponentSuite, NotTested, given, require

__all__ = ["PromptFormatSuite"]

ROWS = tuple({"prompt": f"{number} + 1 =", "label": str(number + 1)} for number in range(13))
"""Rows of the example file; all fields are text, so that every format can write them."""

WINDOWS = (0, 5, None)
"""In file order, within five adjacent rows, in any order."""


class PromptFormatSuite(ComponentSuite):
    """For prompt formats; subclasses override :meth:`write`.

    Attributes:
        rows: field -> value, for each row of the example file.
    """

    kind: ClassVar[Kind] = Kind.PROMPT_FORMAT
    rows: ClassVar[Sequence[Mapping[str, object]]] = ROWS

    def write(self, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
        """Write a file or folder of the format; an existing one is replaced.

        Raises:
            NotTested: the subclass does not override this method.
        """
        raise NotTested(
            f"no example of prompt format {self.component!r} can be written. Give the class a method "
            "write(self, path, rows) that writes one, and run it with pytest."
        )

    def test_it_reads_every_row_in_the_order_of_the_file(self) -> None:
        with self._file() as path:
            for window in WINDOWS:
                self._require_rows(self._open(path, window), path, 0, len(self.rows))

    @given(
        max_examples=15,
        window=st.sampled_from(WINDOWS),
        parts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), min_size=1, max_size=6),
    )
    def test_any_part_is_read_any_number_of_times(self, window: int | None, parts: list[tuple[int, int]]) -> None:
        with self._file() as path:
            table = self._open(path, window)
            for start, count in parts:
                self._require_rows(table, path, start, min(start + count, len(self.rows)))

    def test_it_knows_where_the_file_ends(self) -> None:
        size = len(self.rows)
        for window in WINDOWS:
            with self._file() as path:
                table = self._open(path, window)
                found = [table.reaches(row) for row in (0, size - 1, size)]
                require(found == [True, True, False], f"reaches() of the first, last and next row is {found}")
                require(table.total() == size, f"total() is {table.total()}, and the file has {size} rows")
                beyond = list(table.read(size - 1, size + 5))
                require(len(beyond) == 1, f"read() from the last row on gave {len(beyond)} rows")

    def test_a_stamp_says_what_a_file_holds_and_not_where_it_lies(self) -> None:
        with self._file() as one, self._file() as same, self._file(self.rows[:-1]) as other:
            first = self._open(one, 0).stamp()
            require(first == self._open(one, 0).stamp(), "two stamps of one file differ")
            require(first == self._open(same, None).stamp(), "the stamp changes with the place or the window")
            require(first != self._open(other, 0).stamp(), "another file has the same stamp, so a run resumes in it")

    def test_a_file_that_changes_while_it_is_open_is_refused(self) -> None:
        with self._file() as path:
            table = self._open(path, 0)
            list(table.read(0, 1))
            self.write(path, [*self.rows, *self.rows])
            self._require_refused(path, lambda: list(table.read(0, len(self.rows))), "a file that became longer")

    def test_a_file_that_is_not_of_the_format_is_refused(self) -> None:
        with self._file() as path:
            (path / self.component if path.is_dir() else path).write_bytes(b"\xff\x00junk\n" * 20)
            self._require_refused(
                path, lambda: [content_of(raw) for raw in self._open(path, 0).read(0, 1)], "a file of junk"
            )

    def _open(self, path: Path, window: int | None) -> PromptTable:
        table: PromptTable = self.make().open(path, window=window)
        return table

    @contextmanager
    def _file(self, rows: Sequence[Mapping[str, object]] | None = None) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows" if "." in self.component else f"rows.{self.component}")
            self.write(path, self.rows if rows is None else rows)
            yield path

    def _require_rows(self, table: PromptTable, path: Path, start: int, stop: int) -> None:
        found = list(table.read(start, stop))
        require(
            [content_of(raw) for raw in found] == [dict(row) for row in self.rows[start:stop]],
            f"read({start}, {stop}) gave other rows than the file has there: {found!r:.300}",
        )
        numbers = [raw.number for raw in found]
        require(numbers == list(range(start + 1, stop + 1)), f"rows {start} to {stop - 1} carry the numbers {numbers}")
        require({raw.file for raw in found} <= {path}, f"rows name another file than {path}, so do messages")

    def _require_refused(self, path: Path, read: Any, what: str) -> None:
        try:
            read()
        except DataError as refused:
            require(path.name in str(refused), f"the DataError about {what} does not name it: {refused}")
        except Exception as error:
            require(False, f"{what} is {type(error).__name__}: {error}; a DataError that names the file is wanted")
        else:
            require(False, f"{what} is read without a word; a DataError that names the file is wanted")
