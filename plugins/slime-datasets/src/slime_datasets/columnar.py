"""Rows of files of columns, which say how many they hold.

    ParquetTable  Parquet, row group by row group
    ArrowTable    Arrow files, mapped into memory: what the datasets library saved, and copies of Parquet files

pyarrow is imported where a file needs it.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from slime_core import RawRow
from slime_core.errors import DataError
from slime_core.prompts.tables import Sizes, stamp_of
from slime_datasets.lines import cache_folder, key_of

__all__ = ["BATCH", "ArrowTable", "ParquetTable"]

BATCH = 256
"""Rows of a Parquet file that are decoded at once."""

BUFFER = 2**20
"""Bytes of a column that are read at once. Nothing of a Parquet file is mapped into memory, since a file that is
truncated while it is mapped ends the process with SIGBUS and no message."""


_BROKEN = (OSError, ValueError, OverflowError, MemoryError, StopIteration)
"""Exceptions of pyarrow, in addition to its own classes, where a file is corrupt."""


class _Counted:
    """Base class of both kinds of tables.

    Arguments:
        path: what messages name.
        sizes: rows of each part of the file, in order.
        files: that hold them.
    """

    def __init__(self, path: Path, sizes: Iterable[int], files: Sequence[Path]) -> None:
        self.path = path
        self._bytes = Sizes(files)
        self._starts: list[int] = [0, *accumulate(sizes)]

    def reaches(self, row: int) -> bool:
        """See :class:`~slime_core.PromptTable`."""
        return row < self._starts[-1]

    def total(self) -> int:
        """See :class:`~slime_core.PromptTable`; the file says it."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[RawRow]:
        """See :class:`~slime_core.PromptTable`."""
        self._bytes.check()
        for row in range(start, min(stop, self._starts[-1])):
            part = bisect_right(self._starts, row) - 1
            yield RawRow(self.path, row + 1, self._row(part, row - self._starts[part]))

    def stamp(self) -> str:
        """See :class:`~slime_core.PromptTable`."""
        return stamp_of(self.path)

    def _row(self, part: int, row: int) -> dict[str, Any]:
        """Row ``row`` of part ``part``."""
        raise NotImplementedError


class ParquetTable(_Counted):
    """The rows of a Parquet file; those that come one after the other are decoded once.

    Arguments:
        window: rows that will be read in any order, before others; so many are held.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path, *, window: int = 0) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not path.is_file() and path.exists():  # a FIFO would be waited for
            raise DataError(f"{path} is no regular file; name a Parquet file")
        try:
            self._file = pq.ParquetFile(path, buffer_size=BUFFER)
            groups = self._file.metadata
            sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
        except (*_BROKEN, pa.ArrowException) as problem:
            raise DataError(f"{path} cannot be read as Parquet: {problem}") from problem
        if min(sizes, default=0) < 0 or sum(sizes) != groups.num_rows:
            raise DataError(f"{path} cannot be read as Parquet: its parts have {sizes} rows, and it {groups.num_rows}")
        super().__init__(path, sizes, [path])
        self._batches: Iterator[Any] = iter(())
        self._group = -1
        self._next = 0
        """The row group whose batches are being read, and the first row of the next batch."""
        self._held: dict[int, list[dict[str, Any]]] = {}
        """First row -> rows that were decoded, at most ``_most`` in all."""
        self._most = window + 2 * BATCH

    def batches(self) -> Iterator[Any]:
        """All rows as record batches, in order."""
        with _decoding(self.path, "Parquet"):
            yield from self._file.iter_batches(batch_size=BATCH)

    @property
    def schema(self) -> Any:
        """Schema of the batches."""
        return self._file.schema_arrow

    def _row(self, part: int, row: int) -> dict[str, Any]:
        whole = self._starts[part] + row
        with _decoding(f"{self.path}, row {whole + 1}", "Parquet"):
            found = next((first for first, rows in self._held.items() if first <= whole < first + len(rows)), None)
            if found is None:
                found = self._decode_to(part, whole)
            return self._held[found][whole - found]

    def _decode_to(self, part: int, row: int) -> int:
        """Decode on to ``row``, which is not held; returns the first row of its batch."""
        if part != self._group or row < self._next:
            self._batches = self._file.iter_batches(batch_size=BATCH, row_groups=[part])
            self._group, self._next = part, self._starts[part]
        while row >= self._next:
            batch, first = next(self._batches), self._next
            self._next += batch.num_rows
            if row < self._next + self._most and first not in self._held:
                self._hold(first, batch.to_pylist())
        return first

    def _hold(self, first: int, rows: list[dict[str, Any]]) -> None:
        self._held[first] = rows
        while sum(map(len, self._held.values())) > self._most:
            del self._held[next(iter(self._held))]


class ArrowTable(_Counted):
    """The rows of Arrow files, mapped into memory: only what is read is loaded.

    Arguments:
        path: what messages name.
        files: in the order of their rows.

    Raises:
        DataError: one cannot be read.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self._files = list(files)
        try:
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
        except (OSError, pa.ArrowException) as problem:
            raise DataError(f"{path} cannot be read as a saved data set: {problem}") from problem
        self._batches = [batch for table in tables for batch in table.to_batches() if batch.num_rows]
        super().__init__(path, (batch.num_rows for batch in self._batches), self._files)

    @classmethod
    def saved(cls, folder: Path) -> ArrowTable:
        """The rows that the datasets library saved in ``folder``.

        Raises:
            DataError: its list of files cannot be read, or rows were chosen that it does not hold in this order.
        """
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            files = [folder / entry["filename"] for entry in state["_data_files"]]
        except (OSError, ValueError, LookupError, TypeError) as problem:
            raise DataError(f"{folder / 'state.json'} does not list the files of a saved data set: {problem}") from None
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: rows were chosen or reordered and the files were not rewritten; save it again after "
                "flatten_indices()"
            )
        return cls(folder, files)

    @classmethod
    def copied(cls, path: Path) -> ArrowTable:
        """The rows of a Parquet file, read from a copy that is fast to read from anywhere; made where there is none.

        Raises:
            DataError: the file cannot be read.
        """
        return _Copied(path)

    def stamp(self) -> str:
        """See :class:`~slime_core.PromptTable`."""
        return "+".join(map(stamp_of, self._files))

    def _row(self, part: int, row: int) -> dict[str, Any]:
        with _decoding(f"{self.path}, row {self._starts[part] + row + 1}", "a saved data set"):
            found: dict[str, Any] = self._batches[part].slice(row, 1).to_pylist()[0]
        return found


class _Copied(ArrowTable):
    """A Parquet file, read from its copy."""

    def __init__(self, path: Path) -> None:
        self._original = path
        super().__init__(path, [_copy(path)])

    def stamp(self) -> str:
        return stamp_of(self._original)


def _copy(path: Path) -> Path:
    """The copy of a Parquet file; made where there is none."""
    import pyarrow as pa

    copy = cache_folder() / f"{key_of(path)}.arrow"
    if not copy.exists():
        table, draft = ParquetTable(path), copy.with_suffix(f".{os.getpid()}")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
                for batch in table.batches():
                    stream.write_batch(batch)
            draft.replace(copy)
        except OSError as problem:
            raise DataError(
                f"{path}: no copy for an exact shuffle can be written to {copy.parent}: {problem}. Name a folder with "
                "room as XDG_CACHE_HOME, or shuffle in windows (--shuffle-window), which needs no copy"
            ) from problem
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    return copy


@contextmanager
def _decoding(what: object, form: str) -> Iterator[None]:
    """Turns decoding errors of pyarrow into an error of the data."""
    import pyarrow as pa

    try:
        yield
    except (*_BROKEN, pa.ArrowException) as problem:
        raise DataError(f"{what} cannot be read as {form}: {problem}; write the file again") from problem
