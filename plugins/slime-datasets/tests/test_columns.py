"""Files of columns through the data source that trains: every form, every order, and what is wrong with rows."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from slime_core.errors import DataError
from slime_core.provisional import PromptRequest, PromptRow
from slime_datasets.columnar import ParquetTable
from slime_datasets.formats import open_table
from slime_datasets.paths import PromptPath
from slime_datasets.rows import content_of, prompts_of

ROWS = [{"prompt": f"p{n}", "label": str(n), "metadata": {"n": n}, "tools": None} for n in range(600)]


@pytest.fixture
def read() -> Callable[..., list[PromptRow]]:
    """``read(path, **fields)``: the rows of a file, of a request with these fields."""

    def rows(path: Path, **fields: Any) -> list[PromptRow]:
        return [row for _, row in prompts_of(PromptRequest(path, **fields))]

    return rows


def table(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
    return path


def written(folder: Path, form: str) -> Path:
    path = folder / f"rows.{form}"
    table = arrow.Table.from_pylist(ROWS)
    match form:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "parquet":
            parquet.write_table(table, path, row_group_size=250)
        case "saved":
            from datasets import Dataset, disable_progress_bars

            disable_progress_bars()
            Dataset(table).save_to_disk(path, num_shards=2)
        case "folder":
            path.mkdir()
            (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:200]))
            parquet.write_table(table.slice(200), path / "b.parquet")
            (path / "_notes.jsonl").write_text("junk")
            (path / "README.md").write_text("junk")
    return path


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_that_are_cut_while_they_are_read_end_the_stream_and_not_the_process(source, tmp_path, form) -> None:
    path = written(tmp_path, form)
    prompts = source(path, streaming_data=True, shuffle=False)
    prompts.next_groups(3)
    for file in [path] if path.is_file() else path.glob("*.arrow"):
        os.truncate(file, 100)
    with pytest.raises(DataError, match="it, and has 100"):
        prompts.next_groups(500)


def test_a_bad_row_of_columns_is_named_by_its_number(source, tmp_path: Path) -> None:
    path = table(tmp_path / "rows.parquet", {"prompt": "a"}, {"prompt": None})
    with pytest.raises(DataError, match="2: field 'prompt'"):
        source(path)
    path.write_text("junk")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        source(path)


def test_nulls_that_columns_add_are_removed_at_every_depth(read, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "image", "image": "x.png"}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    function = {"name": "f", "parameters": {"x": {"type": "int"}, "y": None}}
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "tools": [{"type": "function", "function": function}]},
        {"prompt": [{"role": "user", "content": parts[:1]}], "tools": None},
    ]
    first, second = read(table(tmp_path / "c.parquet", *rows), label_key=None, tool_key="tools")
    assert (first.prompt, second.prompt) == (rows[0]["prompt"], rows[1]["prompt"])
    assert first.tools == [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]
    messages = [{"role": "user", "content": "a"}, called]
    (row,) = read(table(tmp_path / "d.parquet", {"prompt": messages}), label_key=None)
    assert row.prompt == messages


def test_images_of_the_datasets_library_become_what_a_request_can_carry(read, tmp_path: Path) -> None:
    images = [{"bytes": b"\x89PNG", "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    path = table(tmp_path / "i.parquet", {"prompt": "p", "images": images, "raw": b"\x89PNG"})
    (row,) = read(path, label_key=None, multimodal_keys=(("image", "images"), ("video", "raw")))
    assert row.inputs == {"image": ["iVBORw==", "b.png"], "video": "iVBORw=="}


@pytest.mark.parametrize(
    ("label", "text"),
    [(Decimal("1.50"), "1.50"), (datetime(2020, 1, 2), "2020-01-02 00:00:00"), (82, "82"), (None, None), ([1], "[1]")],
    ids=str,
)
def test_a_label_of_columns_is_its_text(read, tmp_path: Path, label: object, text: str | None) -> None:
    (row,) = read(table(tmp_path / "l.parquet", {"prompt": "p", "label": label}))
    assert row.label == text


def test_a_label_of_bytes_is_refused(read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1: field 'label'"):
        read(table(tmp_path / "l.parquet", {"prompt": "p", "label": b"\xff"}))


def test_a_parquet_file_that_is_corrupt_inside_is_named_and_leaves_no_half_copy(source, tmp_path, cache) -> None:
    path = table(tmp_path / "rows.parquet", *({"prompt": f"{n} " * 50} for n in range(3000)))
    content = bytearray(path.read_bytes())
    content[200:3000] = b"\xff" * 2800
    path.write_bytes(content)
    for order in ({"streaming_data": True, "shuffle": False}, {"streaming_data": True}, {}):
        with pytest.raises(DataError, match=r"rows\.parquet"):
            source(path, **order).next_groups(1)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_flipped_bytes_are_an_error_of_the_data_or_read(tmp_path: Path) -> None:
    rows = {"prompt": [f"{n}+{n}" for n in range(600)], "label": [f"{2 * n}" for n in range(600)]}
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table(rows), path, row_group_size=100, compression="none")
    content = path.read_bytes()
    chance, refused = random.Random(5), 0
    for number in range(400):
        flipped = bytearray(content)
        for _ in range(chance.choice((1, 1, 4, 30))):
            flipped[chance.randrange(4, len(flipped))] ^= 1 << chance.randrange(8)
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(flipped)
        try:
            flipped_table = ParquetTable(path)
            assert len(list(flipped_table.read(0, flipped_table.total()))) <= 600
        except DataError:
            refused += 1
    assert refused > 100


def test_in_windows_each_batch_of_a_parquet_file_is_decoded_once(source, tmp_path, monkeypatch) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": f"{n}"} for n in range(2000)]), path, row_group_size=1500)
    prompts = source(path, streaming_data=True, shuffle_window=700)
    decoded: list[int] = []
    hold = ParquetTable._hold
    monkeypatch.setattr(
        ParquetTable, "_hold", lambda table, first, rows: (decoded.append(first), hold(table, first, rows))
    )
    names = [int(str(group[0].prompt)) for group in prompts.next_groups(2000)]
    assert sorted(names) == list(range(2000))
    assert sorted(decoded) == [0, 256, 512, 768, 1024, 1280, 1500, 1756]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "folder"])
def test_every_form_of_file_holds_the_same_prompts_and_resumes_exactly(source, read, tmp_path, form, order) -> None:
    path = written(tmp_path, form)
    assert [(row.prompt, row.label, row.metadata) for row in read(path)] == [
        (f"p{n}", str(n), {"n": n}) for n in range(600)
    ]
    assert [row.label for row in read(Path(f"{path}@[190:260]"))] == [str(n) for n in range(190, 260)]
    first = source(Path(f"{path}@[:300]"), **order).next_groups(300)
    assert sorted(int(group[0].metadata["n"]) for group in first) == list(range(300))
    prompts, resumed = source(path, **order), source(path, **order)
    prompts.next_groups(250)
    resumed.restore(json.loads(json.dumps(prompts.state())))
    assert resumed.next_groups(700) == prompts.next_groups(700)


def test_a_folder_of_several_splits_is_refused_with_their_names(source, tmp_path: Path) -> None:
    (tmp_path / "split" / "train").mkdir(parents=True)
    (tmp_path / "split" / "train" / "state.json").write_text("{}")
    (tmp_path / "split" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"/split/train"):
        source(tmp_path / "split")
    with pytest.raises(DataError, match=r"state\.json"):
        source(tmp_path / "split" / "train")


def test_patterns_and_folders_take_prompt_files_and_saved_data_sets(tmp_path: Path) -> None:
    written(tmp_path, "parquet")
    written(tmp_path, "saved").rename(tmp_path / "saved")
    for name in ("a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}")

    def names(path: Path) -> list[str]:
        return [file.name for file in PromptPath.read(path).files()]

    assert names(tmp_path / "*") == ["a.jsonl", "rows.parquet", "saved"]
    assert names(tmp_path / "*.*") == ["a.jsonl", "notes.txt", "rows.parquet"]
    assert names(tmp_path) == ["a.jsonl", "rows.parquet"]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_a_table_returns_rows_in_any_order(tmp_path: Path, form: str) -> None:
    table = open_table(written(tmp_path, form), window=None)
    assert (table.reaches(599), table.reaches(600), table.total()) == (True, False, 600)
    starts = random.Random(0).choices(range(600), k=40)
    for start in starts:
        numbers = [int(content_of(raw)["label"]) for raw in table.read(start, start + 9)]
        assert numbers == list(range(600))[start : start + 9]
