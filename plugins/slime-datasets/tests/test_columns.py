"""Files of columns through the data source that trains: every form, every order, and what is wrong with rows."""

from __future__ import annotations

import json
import os
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from slime_core import PromptRequest, RunView
from slime_core.config.prompt_paths import PromptPath
from slime_core.errors import DataError
from slime_core.plugins.activation import activate
from slime_core.plugins.construction import prompt_formats
from slime_core.prompts.rows import PromptRow, numbered_prompts
from slime_datasets.columnar import ParquetTable
from slime_datasets.options import DatasetsOptions
from slime_datasets.streams import PromptStreams

FORMATS = prompt_formats(activate(["datasets"]).registry, {}, RunView())
ORDERS: list[dict[str, Any]] = [
    {},
    {"streaming_data": True},
    {"streaming_data": True, "shuffle_window": 100},
    {"streaming_data": True, "shuffle": False},
    {"shuffle": False},
]
ROWS = [{"prompt": f"p{n}", "label": str(n), "metadata": {"n": n}, "tools": None} for n in range(600)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slime" / "prompts"


def source(path: Path, **fields: Any) -> PromptStreams:
    """Of options of the plugin and fields of a request, by their names."""
    options = {name: fields.pop(name) for name in DatasetsOptions.model_fields if name in fields}
    request = PromptRequest(path, formats=FORMATS, **{"label_key": None, **fields})
    return PromptStreams(DatasetsOptions(**options), RunView(prompts=request))


def read(path: Path, **fields: Any) -> list[PromptRow]:
    return [row for _, row in numbered_prompts(PromptRequest(path, formats=FORMATS, **fields))]


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
def test_columns_that_are_cut_while_they_are_read_end_the_stream_and_not_the_process(tmp_path, form):
    path = written(tmp_path, form)
    prompts = source(path, streaming_data=True, shuffle=False)
    prompts.next_groups(3)
    for file in [path] if path.is_file() else path.glob("*.arrow"):
        os.truncate(file, 100)
    with pytest.raises(DataError, match="it, and has 100"):
        prompts.next_groups(500)


def test_a_bad_row_of_columns_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "a"}, {"prompt": None}]), path)
    with pytest.raises(DataError, match="2: field 'prompt'"):
        source(path)
    path.write_text("junk")
    with pytest.raises(DataError, match=r"rows\.parquet cannot"):
        source(path)


def test_messages_of_columns_have_no_fields_that_only_others_have(tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parquet.write_table(
        arrow.Table.from_pylist([{"prompt": [{"role": "user", "content": "a"}, called]}]), tmp_path / "c.parquet"
    )
    (row,) = read(tmp_path / "c.parquet", label_key=None)
    assert row.prompt == [{"role": "user", "content": "a"}, called]


def test_nulls_that_columns_add_are_removed_at_every_depth(tmp_path):
    parts = [{"type": "text", "text": "hi"}, {"type": "image", "image": "x.png"}]
    function = {"name": "f", "parameters": {"x": {"type": "int"}, "y": None}}
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "tools": [{"type": "function", "function": function}]},
        {"prompt": [{"role": "user", "content": parts[:1]}], "tools": None},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    first, second = read(tmp_path / "c.parquet", label_key=None, tool_key="tools")
    assert (first.prompt, second.prompt) == (rows[0]["prompt"], rows[1]["prompt"])
    assert first.tools == [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}]


def test_images_of_the_datasets_library_become_what_a_request_can_carry(tmp_path):
    images = [{"bytes": b"\x89PNG", "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    parquet.write_table(
        arrow.Table.from_pylist([{"prompt": "p", "images": images, "raw": b"\x89PNG"}]), tmp_path / "i.parquet"
    )
    keys = (("image", "images"), ("video", "raw"))
    (row,) = read(tmp_path / "i.parquet", label_key=None, multimodal_keys=keys)
    assert row.inputs == {"image": ["iVBORw==", "b.png"], "video": "iVBORw=="}


@pytest.mark.parametrize(
    ("label", "text"),
    [(Decimal("1.50"), "1.50"), (datetime(2020, 1, 2), "2020-01-02 00:00:00"), (82, "82"), (None, None), ([1], "[1]")],
    ids=str,
)
def test_a_label_of_columns_is_its_own_text(tmp_path, label, text):
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "p", "label": label}]), tmp_path / "l.parquet")
    (row,) = read(tmp_path / "l.parquet")
    assert row.label == text


def test_a_label_of_bytes_is_refused(tmp_path):
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "p", "label": b"\xff"}]), tmp_path / "l.parquet")
    with pytest.raises(DataError, match="1: field 'label'"):
        read(tmp_path / "l.parquet")


def test_a_parquet_file_that_is_corrupt_inside_is_named_and_leaves_no_half_copy(tmp_path, cache):
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": f"{n} " * 50} for n in range(3000)]), path)
    content = bytearray(path.read_bytes())
    content[200:3000] = b"\xff" * 2800
    path.write_bytes(content)
    for order in ({"streaming_data": True, "shuffle": False}, {"streaming_data": True}, {}):
        with pytest.raises(DataError, match=r"rows\.parquet(, row 1)? cannot"):
            source(path, **order).next_groups(1)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_in_windows_each_batch_of_a_parquet_file_is_decoded_once(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": f"{n}"} for n in range(2000)]), path, row_group_size=1500)
    prompts = source(path, streaming_data=True, shuffle_window=700)
    decoded = []
    held = ParquetTable._hold
    monkeypatch.setattr(
        ParquetTable, "_hold", lambda table, first, rows: (decoded.append(first), held(table, first, rows))
    )
    found = [int(str(group[0].prompt)) for group in prompts.next_groups(2000)]
    assert sorted(found) == list(range(2000))
    assert sorted(decoded) == [0, 256, 512, 768, 1024, 1280, 1500, 1756]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "folder"])
def test_every_form_of_file_holds_the_same_prompts(tmp_path, form):
    path = written(tmp_path, form)
    wanted = [(f"p{n}", str(n), {"n": n}) for n in range(600)]
    assert [(row.prompt, row.label, row.metadata) for row in read(path)] == wanted
    sliced = read(Path(f"{path}@[190:260]"))
    assert [row.label for row in sliced] == [str(n) for n in range(190, 260)]
    for order in ORDERS:
        first = source(Path(f"{path}@[:300]"), **order).next_groups(300)
        assert sorted(int(group[0].metadata["n"]) for group in first) == list(range(300))


def test_a_folder_of_several_splits_is_refused_with_their_names(tmp_path):
    (tmp_path / "split" / "train").mkdir(parents=True)
    (tmp_path / "split" / "train" / "state.json").write_text("{}")
    (tmp_path / "split" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r".*/split/train$"):
        source(tmp_path / "split")
    with pytest.raises(DataError, match=r"state\.json does"):
        source(tmp_path / "split" / "train")


def test_a_run_resumes_in_columns_where_it_stood(tmp_path):
    for form in ("parquet", "saved", "folder"):
        path = written(tmp_path, form)
        for order in ORDERS:
            prompts = source(path, **order)
            prompts.next_groups(250)
            state = json.loads(json.dumps(prompts.state()))
            resumed = source(path, **order)
            resumed.restore(state)
            assert resumed.next_groups(700) == prompts.next_groups(700)


def test_patterns_and_folders_take_files_of_the_formats_that_are_there(tmp_path):
    written(tmp_path, "parquet")
    written(tmp_path, "saved").rename(tmp_path / "saved")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("{}")
    named = {name: [file.name for file in PromptPath.read(tmp_path / name).files(FORMATS)] for name in ("*", "*.*")}
    assert named == {"*": ["a.jsonl", "rows.parquet", "saved"], "*.*": ["a.jsonl", "notes.txt", "rows.parquet"]}
    assert [file.name for file in PromptPath.read(tmp_path).files(FORMATS)] == ["a.jsonl", "rows.parquet"]
    assert [file.name for file in PromptPath.read(tmp_path).files()] == ["a.jsonl"]
