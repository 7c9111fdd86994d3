"""The prompt formats: Parquet files, and folders that the datasets library saved."""

from __future__ import annotations

from pathlib import Path

from slime_core import PromptTable
from slime_core.errors import DataError
from slime_datasets.columnar import ArrowTable, ParquetTable

__all__ = ["Parquet", "SavedDataset", "SavedSplits"]


class Parquet:
    """Parquet files.

    To read one row, the batch around it is decoded. For random order, the file is first copied to Arrow's format in the
    cache folder, once.
    """

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """See :class:`~slime_core.PromptFormat`."""
        return ArrowTable.copied(path) if window is None else ParquetTable(path, window=window)


class SavedDataset:
    """Folders with one split of a data set, as ``Dataset.save_to_disk`` of the datasets library writes them."""

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """See :class:`~slime_core.PromptFormat`; random order is as fast as file order, so ``window`` is unused."""
        del window
        return ArrowTable.saved(path)


class SavedSplits:
    """Folders of ``DatasetDict.save_to_disk``: refused with a message that names the splits."""

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """Raise an error that names the splits.

        Raises:
            DataError: always.
        """
        del window
        splits = sorted(each.name for each in path.iterdir() if (each / "state.json").is_file())
        raise DataError(
            f"{path} holds a data set of several splits, {', '.join(splits) or 'none of which is there'}; name one, "
            f"such as {path / (splits or ['train'])[0]}"
        )
