"""A Parquet file with flipped bytes is an error of the data, or read; never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.errors import DataError
from slime_datasets.columnar import ParquetTable


def test_flipped_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    rows = {"prompt": [f"{n}+{n}" for n in range(600)], "label": [f"{2 * n}" for n in range(600)]}
    pq.write_table(pa.table(rows), whole, row_group_size=100, compression="none")
    content = whole.read_bytes()
    chance, refused = random.Random(5), 0
    for number in range(400):
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 1, 4, 30))):
            flipped[chance.randrange(4, len(flipped))] ^= 1 << chance.randrange(8)
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(flipped)
        try:
            table = ParquetTable(path)
            assert len(list(table.read(0, table.total()))) <= 600
        except DataError:
            refused += 1
    assert refused > 100
