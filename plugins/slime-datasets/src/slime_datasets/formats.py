"""Opens the files that a path of prompts names, each by its format."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import DataError
from slime_datasets.columnar import ArrowTable, ParquetTable
from slime_datasets.lines import LineTable
from slime_datasets.paths import PromptPath, format_of
from slime_datasets.tables import Rows, Table

__all__ = ["open_rows", "open_table"]


def open_rows(path: Path, *, window: int | None = 0) -> Rows:
    """Open the rows that ``path`` names (:mod:`slime_datasets.paths`).

    Arguments:
        window: largest distance from file order in which rows are read. 0: in file order; N: in any order among N
            neighbours, then among the next N; None means in any order among all.

    Raises:
        DataError: there are no such files, or one cannot be read.
    """
    slice_ = PromptPath.read(path)
    tables = [open_table(file, window=window) for file in slice_.files()]
    return Rows(tables, start=slice_.start, stop=slice_.stop)


def open_table(path: Path, *, window: int | None = 0) -> Table:
    """Open a prompt file, or a folder that the datasets library saved; reads as little as possible.

    A Parquet file that is read in random order (``window`` None) is first copied to Arrow's format in the cache folder,
    once.

    Raises:
        DataError: it cannot be read.
    """
    match format_of(path):
        case "parquet":
            return ArrowTable.copied(path) if window is None else ParquetTable(path, window=window)
        case "state.json":
            return ArrowTable.saved(path)
        case "dataset_dict.json":
            splits = sorted(split.name for split in path.iterdir() if (split / "state.json").is_file())
            raise DataError(
                f"{path} holds a data set of the splits {', '.join(splits)}; name one, such as "
                f"{path / (splits or ['train'])[0]}"
            )
    return LineTable(path)
