"""Rows of prompt files by their number, without holding a file in memory.

    LineTable     JSON Lines; knows where every 64th line begins, as far as it was read or indexed
    ParquetTable  Parquet, row group by row group
    ArrowTable    what the datasets library saved, mapped into memory
    Joined        several of them, and a slice, as one

Rows are numbered from 0. A table says whether it reaches a row before it says how many it has: to count the lines of a
large file takes long, to read on does not. pyarrow is imported where a file needs it.
"""

from __future__ import annotations

import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from slime_core.config.prompt_paths import PromptPath, is_saved_dataset
from slime_core.data.line_index import EVERY, LineIndex, cache_folder, indexed, key_of, stamp_of
from slime_core.errors import DataError

__all__ = ["ArrowTable", "Joined", "LineTable", "ParquetTable", "Raw", "Table", "open_rows"]

BATCH = 256
"""Rows of a Parquet file that are decoded at once."""


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
        return isinstance(self.content, bytes) and not self.content.strip()


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


class LineTable:
    """The lines of a file; the last may lack its line feed.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb")
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem}. Name a JSON Lines file in UTF-8.") from problem
        weakref.finalize(self, self._stream.close)
        self.index = LineIndex()

    def reaches(self, row: int) -> bool:
        """Reads on from where the file is known as far as ``row``."""
        while not self.index.is_whole and row >= self.index.frontier[0]:
            self._read_on()
        return row < self.index.frontier[0]

    def total(self) -> int:
        """The number of lines; taken from the kept index, which is made if there is none."""
        if not self.index.is_whole:
            self.index = indexed(self.path)
        return self.index.frontier[0]

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """See :class:`Table`; finds the beginning by the nearest line that is known."""
        line, offset = self.index.nearest(start)
        stream = self._stream
        stream.seek(offset)
        for _ in range(start - line):
            stream.readline()
        for number in range(start, stop):
            content = stream.readline()
            if not content:
                return
            place = stream.tell()
            yield Raw(self.path, number + 1, content)
            stream.seek(place)  # whoever took the row may have read elsewhere

    def stamp(self) -> str:
        """See :class:`Table`."""
        return stamp_of(self.path)

    def _read_on(self) -> None:
        line, offset = self.index.frontier
        self._stream.seek(offset)
        lengths = [len(content) for content in islice(self._stream_lines(), EVERY)]
        self.index.extend(line + len(lengths), offset + sum(lengths), is_end=len(lengths) < EVERY)

    def _stream_lines(self) -> Iterator[bytes]:
        return iter(self._stream.readline, b"")


class ParquetTable:
    """The rows of a Parquet file.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (OSError, pa.ArrowException) as problem:
            raise DataError(f"{path} cannot be read as Parquet: {problem}") from problem
        groups = self._file.metadata
        sizes = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
        self._starts: list[int] = [0, *accumulate(sizes)]
        self._batches: Iterator[Any] = iter(())
        self._held: tuple[int, int, list[dict[str, Any]]] = (-1, 0, [])

    def reaches(self, row: int) -> bool:
        """See :class:`Table`."""
        return row < self._starts[-1]

    def total(self) -> int:
        """See :class:`Table`; the file says it."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """See :class:`Table`; rows that come one after the other are decoded once."""
        for row in range(start, min(stop, self._starts[-1])):
            yield Raw(self.path, row + 1, self._row(row))

    def batches(self) -> Iterator[Any]:
        """All rows as record batches, in order."""
        yield from self._file.iter_batches(batch_size=BATCH)

    @property
    def schema(self) -> Any:
        """Of the batches."""
        return self._file.schema_arrow

    def stamp(self) -> str:
        """See :class:`Table`."""
        return stamp_of(self.path)

    def _row(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._starts, row) - 1
        held, first, rows = self._held
        if group != held or row < first:
            self._batches = self._file.iter_batches(batch_size=BATCH, row_groups=[group])
            first, rows = self._starts[group], []
        while row >= first + len(rows):
            first, rows = first + len(rows), next(self._batches).to_pylist()
        self._held = group, first, rows
        return rows[row - first]


class ArrowTable:
    """The rows of Arrow files, mapped into memory: only what is read is loaded.

    Arguments:
        path: what messages name.
        files: in the order of their rows.

    Raises:
        DataError: one cannot be read.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        import pyarrow as pa

        self.path, self._files = path, list(files)
        try:
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
        except (OSError, pa.ArrowException) as problem:
            raise DataError(f"{path} cannot be read as a saved data set: {problem}") from problem
        self._batches = [batch for table in tables for batch in table.to_batches() if batch.num_rows]
        self._starts: list[int] = [0, *accumulate(batch.num_rows for batch in self._batches)]

    @classmethod
    def saved(cls, folder: Path) -> ArrowTable:
        """What the datasets library saved in ``folder``.

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
                f"{folder}: rows were chosen or reordered and the files were not written anew; save it again after "
                "flatten_indices()"
            )
        return cls(folder, files)

    def reaches(self, row: int) -> bool:
        """See :class:`Table`."""
        return row < self._starts[-1]

    def total(self) -> int:
        """See :class:`Table`; the files say it."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Raw]:
        """See :class:`Table`."""
        for row in range(start, min(stop, self._starts[-1])):
            batch = bisect_right(self._starts, row) - 1
            (content,) = self._batches[batch].slice(row - self._starts[batch], 1).to_pylist()
            yield Raw(self.path, row + 1, content)

    def stamp(self) -> str:
        """See :class:`Table`."""
        return "+".join(map(stamp_of, self._files))


class Joined:
    """The rows ``start`` to ``stop - 1`` of several tables, one after the other, numbered from 0.

    Arguments:
        stop: None: to the end.
    """

    def __init__(self, tables: Sequence[Table], *, start: int = 0, stop: int | None = None) -> None:
        self.tables, self._start, self._stop = list(tables), start, stop
        self._starts = [0]
        """Of the tables whose beginning is known."""

    def reaches(self, row: int) -> bool:
        """See :class:`Table`."""
        inside = self._stop is None or self._start + row < self._stop
        return inside and self._find(self._start + row) is not None

    def total(self) -> int:
        """See :class:`Table`."""
        rows = sum(table.total() for table in self.tables)
        return max(0, min(rows, rows if self._stop is None else self._stop) - self._start)

    def read(self, start: int, stop: int | None = None) -> Iterator[Raw]:
        """See :class:`Table`; ``stop`` None: to the end."""
        ends = [end for end in (self._stop, None if stop is None else self._start + stop) if end is not None]
        row, end = self._start + start, min(ends, default=None)
        while (end is None or row < end) and (found := self._find(row)) is not None:
            table, inner = found
            last = inner + BATCH if end is None else min(inner + BATCH, inner + end - row)
            for raw in table.read(inner, last):
                row += 1
                yield raw

    def row(self, row: int) -> Raw:
        """One row, which there has to be."""
        return next(self.read(row, row + 1))

    @cached_property
    def stamp(self) -> str:
        """Tells these rows from others."""
        return f"{'|'.join(table.stamp() for table in self.tables)}[{self._start}:{self._stop}]"

    def places(self, rows: Sequence[int]) -> dict[str, Any]:
        """What :meth:`know` needs to find ``rows`` again without reading all that stands before them."""
        found = [self._find(self._start + row) for row in rows]
        places = {(self.tables.index(table), *table.index.nearest(inner)) for table, inner in _lines(found)}
        return {"starts": list(self._starts), "places": sorted(map(list, places))}

    def know(self, places: dict[str, Any]) -> None:
        """Take over what :meth:`places` of the same files said."""
        self._starts = list(places["starts"])
        for number, line, offset in places["places"]:
            table = self.tables[number]
            if isinstance(table, LineTable):
                table.index.know(line, offset)

    def _find(self, row: int) -> tuple[Table, int] | None:
        """The table that holds ``row``, and the row's number in it; None: there is no such row."""
        number = bisect_right(self._starts, row) - 1
        while number < len(self.tables):
            table, inner = self.tables[number], row - self._starts[number]
            if table.reaches(inner):
                return table, inner
            number += 1
            if number == len(self._starts):
                self._starts.append(self._starts[-1] + table.total())
        return None


def _lines(found: Sequence[tuple[Table, int] | None]) -> Iterator[tuple[LineTable, int]]:
    for each in found:
        if each is not None and isinstance(each[0], LineTable):
            yield each[0], each[1]


def open_rows(path: Path, *, draws: bool = False) -> Joined:
    """The rows that ``path`` names; see :mod:`slime_core.config.prompt_paths`.

    Arguments:
        draws: rows will be read one by one from everywhere. To read one of a Parquet file, many have to be decoded;
            such files are copied as Arrow files into the cache folder, once.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    where = PromptPath.read(path)
    return Joined([_open(file, draws=draws) for file in where.files()], start=where.start, stop=where.stop)


def _open(file: Path, *, draws: bool) -> Table:
    if is_saved_dataset(file):
        return ArrowTable.saved(file)
    if file.suffix != ".parquet":
        return LineTable(file)
    return _Copied(file) if draws else ParquetTable(file)


class _Copied(ArrowTable):
    """A Parquet file, read from its copy."""

    def __init__(self, path: Path) -> None:
        self._original = path
        super().__init__(path, [_copy(path)])

    def stamp(self) -> str:
        return stamp_of(self._original)


def _copy(path: Path) -> Path:
    """The copy of a Parquet file that is fast to read from anywhere; made where there is none."""
    import pyarrow as pa

    copy = cache_folder() / f"{key_of(path)}.arrow"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        table, draft = ParquetTable(path), copy.with_suffix(f".{os.getpid()}")
        with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            for batch in table.batches():
                stream.write_batch(batch)
        draft.replace(copy)
    return copy
