"""The components of this plugin, held to the contract by the kit that plugin authors use."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from slime_testing import DataSourceSuite, GenerateFunctionSuite, PromptFormatSuite


class TestParquet(PromptFormatSuite):
    component = "parquet"

    def write(self, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=4)


class TestSaved(PromptFormatSuite):
    component = "state.json"

    def write(self, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        shutil.rmtree(path, ignore_errors=True)
        Dataset.from_list(list(rows)).save_to_disk(path, num_shards=2)


class TestFromMessages(GenerateFunctionSuite):
    component = "from_messages"
    apply_chat_template = True
    prompts = tuple(
        [{"role": "user", "content": text}, {"role": "assistant", "content": f"about {text}"}]
        for text in ("12", "ab c")
    )


class TestFromBuffer(GenerateFunctionSuite):
    component = "from_buffer"


class TestBuffered(DataSourceSuite):
    component = "buffered"


class TestStreams(DataSourceSuite):
    component = "streams"
