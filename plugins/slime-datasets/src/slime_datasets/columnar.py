"""Tables of rows from columnar files, which store their number of rows.

    ParquetTable  Parquet, row group by row group
    ArrowTable    Arrow files, mapped into memory: saved by the datasets library, or copies of Parquet files

pyarrow is imported only when a file needs it.
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

from slime_core.errors import DataError
from slime_datasets.lines import cache_folder, key_of
from slime_datasets.tables import Row, Sizes, stamp_of

__all__ = ["BATCH", "ArrowTable", "ParquetTable"]

BATCH = 256
"""Rows of a Parquet file that are decoded together."""

BUFFER = 2**20
"""Bytes of a column that are read at once. Parquet files are not mapped into memory: if a mapped file is truncated, the
process is killed by SIGBUS without a message."""


_BROKEN = (OSError, ValueError, OverflowError, MemoryError, StopIteration)
"""Exceptions that pyarrow raises for corrupt files, in addition to pyarrow's classes."""


class _Counted:
    """Base class of both tables.

    Arguments:
        path: the path that messages name.
        sizes: number of rows of each part of the file, in order.
        files: the files that contain the rows.
    """

    def __init__(self, path: Path, sizes: Iterable[int], files: Sequence[Path]) -> None:
        self.path = path
        self._bytes = Sizes(files)
        self._starts: list[int] = [0, *accumulate(sizes)]

    def reaches(self, row: int) -> bool:
        """See :class:`~slime_datasets.tables.Table`."""
        return row < self._starts[-1]

    def total(self) -> int:
        """See :class:`~slime_datasets.tables.Table`; the number comes from the file's metadata."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Row]:
        """See :class:`~slime_datasets.tables.Table`."""
        self._bytes.check()
        for row in range(start, min(stop, self._starts[-1])):
            part = bisect_right(self._starts, row) - 1
            yield Row(self.path, row + 1, self._row(part, row - self._starts[part]))

    def stamp(self) -> str:
        """See :class:`~slime_datasets.tables.Table`."""
        return stamp_of(self.path)

    def locate(self, row: int) -> list[int]:
        """See :class:`~slime_datasets.tables.Table`: every row is found by its number."""
        del row
        return []

    def skip_to(self, place: Sequence[int]) -> None:
        """See :class:`~slime_datasets.tables.Table`; does nothing."""

    def _row(self, part: int, row: int) -> dict[str, Any]:
        """Return row ``row`` of part ``part``."""
        raise NotImplementedError


class ParquetTable(_Counted):
    """The rows of a Parquet file; consecutive rows are decoded once.

    Arguments:
        window: number of rows that are read in any order before others; as many decoded rows are cached.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path, *, window: int = 0) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

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
        """The row group that is being read, and the first row of its next batch."""
        self._held: dict[int, list[dict[str, Any]]] = {}
        """First row -> decoded rows, at most ``_most`` in all."""
        self._most = window + 2 * BATCH

    def batches(self) -> Iterator[Any]:
        """Yield all rows as record batches, in order."""
        with _decoding(self.path, "Parquet"):
            yield from self._file.iter_batches(batch_size=BATCH)

    @property
    def schema(self) -> Any:
        """Schema of the record batches."""
        return self._file.schema_arrow

    def _row(self, part: int, row: int) -> dict[str, Any]:
        number = self._starts[part] + row
        with _decoding(f"{self.path}, row {number + 1}", "Parquet"):
            start = next((first for first, rows in self._held.items() if first <= number < first + len(rows)), None)
            if start is None:
                start = self._decode_to(part, number)
            return self._held[start][number - start]

    def _decode_to(self, part: int, row: int) -> int:
        """Decode forward to ``row``, which is not cached; return the first row of its batch."""
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
    """The rows of Arrow files, mapped into memory: only pages that are read are loaded.

    Arguments:
        path: the path that messages name.
        files: the files, in the order of their rows.

    Raises:
        DataError: a file cannot be read.
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
        """Open the data set that the datasets library saved in ``folder``.

        Raises:
            DataError: the list of files cannot be read, or the data set was filtered or reordered without rewriting.
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
        """Open a Parquet file through an Arrow copy, which has fast random access; the copy is made if it is missing.

        Raises:
            DataError: the file cannot be read.
        """
        return _Copied(path)

    def stamp(self) -> str:
        """See :class:`~slime_datasets.tables.Table`."""
        return "+".join(map(stamp_of, self._files))

    def _row(self, part: int, row: int) -> dict[str, Any]:
        with _decoding(f"{self.path}, row {self._starts[part] + row + 1}", "a saved data set"):
            values: dict[str, Any] = self._batches[part].slice(row, 1).to_pylist()[0]
        return values


class _Copied(ArrowTable):
    """A Parquet file, read from its copy."""

    def __init__(self, path: Path) -> None:
        self._original = path
        super().__init__(path, [_copy(path)])

    def stamp(self) -> str:
        return stamp_of(self._original)


def _copy(path: Path) -> Path:
    """Return the Arrow copy of a Parquet file; it is written if it is missing."""
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
    """Convert decoding errors of pyarrow to ``DataError``."""
    import pyarrow as pa

    try:
        yield
    except (*_BROKEN, pa.ArrowException) as problem:
        raise DataError(f"{what} cannot be read as {form}: {problem}; write the file again") from problem
