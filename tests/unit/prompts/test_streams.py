"""Prompts by their number, held or streamed: every form of file, every order, and exact resumption."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, RunView
from slime_core.config.prompt_paths import PromptPath
from slime_core.errors import CheckpointError, DataError
from slime_core.prompts.line_index import EVERY, LineIndex, indexed
from slime_core.prompts.mixed import shares, spread
from slime_core.prompts.orders import Feistel, Windows
from slime_core.prompts.prompts import PromptFiles
from slime_core.prompts.tables import LineTable, open_rows

ORDERS: list[dict[str, Any]] = [
    {},
    {"streams": True},
    {"streams": True, "window": 100},
    {"streams": True, "shuffle": False},
    {"shuffle": False},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slime" / "prompts"


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """700 prompts, with empty lines, lines that cannot be read and prompts that end on 13 in between."""
    lines = []
    for number in range(700):
        lines.append(json.dumps({"prompt": f"p{number}"}))
        lines += [""] * (number % 97 == 0) + ["junk"] * (number % 101 == 0)
    path = tmp_path / "messy.jsonl"
    path.write_text("\n".join(lines))
    return path


def source(path: Path, **request: Any) -> PromptFiles:
    return PromptFiles(None, RunView(prompts=PromptRequest(path, **{"label_key": None, **request})))


def drawn(prompts: PromptFiles, n: int) -> list[Any]:
    return [group[0].prompt for group in prompts.next_groups(n)]


def fits(prompt: Any) -> bool:
    return not str(prompt).endswith("13")


# --- Orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_an_exact_shuffle_has_every_place_once_and_depends_on_its_key(size):
    one, other = ([Feistel(size, key)(place) for place in range(size)] for key in ("0:0", "0:1"))
    assert sorted(one) == sorted(other) == list(range(size))
    assert size < 64 or one != other


def test_an_exact_shuffle_is_the_same_on_every_machine():
    assert [Feistel(5, "0:0")(place) for place in range(5)] == [4, 1, 2, 0, 3]


def test_rows_come_everywhere_in_an_exact_shuffle():
    at_first = Counter(Feistel(4, f"{seed}:0")(0) for seed in range(400))
    assert all(70 <= at_first[row] <= 130 for row in range(4))


def test_windows_shuffle_neighbours_only():
    order = Windows(10, "0:0")
    rows = [order.row(place, 25) for place in range(25)]
    assert [sorted(rows[start : start + 10]) for start in (0, 10, 20)] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 25)),
    ]
    assert rows != list(range(25))


# --- Streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_prompt_that_is_kept_comes_once_an_epoch_and_the_others_are_counted_once(messy, order):
    told: Counter[str] = Counter()
    prompts = source(messy, skips_bad=True, keeps=fits, tell=lambda why, n: told.update({why: n}), **order)
    epochs = [drawn(prompts, 693) for _ in range(3)]
    assert all(sorted(epoch) == sorted(f"p{n}" for n in range(700) if n % 100 != 13) for epoch in epochs)
    assert told == {"too_long": 7, "bad": 7}
    assert (epochs[0] == epochs[1]) is (order.get("shuffle") is False)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("taken", [0, 5, 500, 693, 1500])
def test_a_restored_stream_goes_on_with_the_same_prompts(messy, order, taken):
    told: Counter[str] = Counter()
    request = {"skips_bad": True, "keeps": fits, "n_samples_per_prompt": 2, **order}
    prompts = source(messy, **request)
    prompts.next_groups(taken)
    prompts.put_back(prompts.next_groups(9)[3:6])
    state = json.loads(json.dumps(prompts.state()))
    assert len(json.dumps(state)) < 2000
    resumed = source(messy, **request, tell=lambda why, n: told.update({why: n}))
    resumed.restore(state)
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert told == {"too_long": 7, "bad": 7}


@pytest.mark.parametrize("order", ORDERS[1:4], ids=str)
def test_how_prompts_are_asked_for_does_not_change_a_stream(messy, order):
    whole, parts = (source(messy, skips_bad=True, keeps=fits, **order) for _ in range(2))
    assert drawn(whole, 1000) == [prompt for n in (3, 500, 1, 496) for prompt in drawn(parts, n)]


@pytest.mark.parametrize(
    "change", [{"seed": 3}, {"window": 50}, {"shuffle": False, "window": None}, {"n_samples_per_prompt": 2}]
)
def test_the_state_of_another_order_is_refused(messy, change):
    request = {"streams": True, "window": 100, "skips_bad": True}
    state = source(messy, **request).state()
    with pytest.raises(CheckpointError, match=f"{next(iter(change))} was"):
        source(messy, **{**request, **change}).restore(state)


def test_a_file_that_changed_is_refused_by_a_stream(messy):
    state = source(messy, streams=True, shuffle=False, skips_bad=True).state()
    messy.write_text(messy.read_text().replace("p699", "q699"))
    with pytest.raises(CheckpointError, match="files was"):
        source(messy, streams=True, shuffle=False, skips_bad=True).restore(state)


@pytest.mark.parametrize("rows", [50, 400])
@pytest.mark.parametrize("order", [order for order in ORDERS if order.get("streams")], ids=str)
def test_a_file_that_becomes_longer_or_shorter_while_it_is_read_ends_the_stream(tmp_path, order, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{n:03}"}}\n' for n in range(300)))
    prompts = source(path, **order)
    prompts.next_groups(100)
    path.write_text("".join(f'{{"prompt": "p{n:03}"}}\n' for n in range(rows)))
    with pytest.raises(DataError) as caught:
        prompts.next_groups(300)
    assert str(caught.value) == (
        f"{path} had 5,700 bytes when this run opened it, and has {19 * rows:,} now. Put it back as it was and resume "
        "from the last checkpoint; write further rows to another file"
    )


def test_a_file_that_is_gone_is_read_to_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(600)))
    prompts = source(path, streams=True, shuffle=False)
    path.unlink()
    assert drawn(prompts, 600) == [f"p{n}" for n in range(600)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_bad_line_is_named_where_it_is_not_skipped(messy, order):
    line = r"\d+" if order.get("streams") and order.get("shuffle", True) else "3"
    with pytest.raises(DataError, match=rf"messy\.jsonl, line {line}, column 1: not JSON"):
        source(messy, **order).next_groups(705)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_where_nothing_is_left_the_run_is_told_why(tmp_path, order):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "13"}\n{"prompt": "113"}')
    with pytest.raises(DataError, match=r"all 2 prompts are longer than --rollout-max-prompt-len; raise it"):
        source(path, keeps=fits, **order).next_groups(1)
    path.write_text('{"prompt": "13"}\njunk')
    with pytest.raises(
        DataError, match=r"no prompt is left; 1 rows cannot be read \(--on-bad-data fail shows the first\)"
    ):
        source(path, keeps=fits, skips_bad=True, **order).next_groups(1)


def test_many_prompts_are_asked_about_at_once_with_their_tools(tmp_path):
    path = tmp_path / "tools.jsonl"
    path.write_text('{"prompt": "a", "tools": [{"name": "t"}]}\n{"prompt": "b", "tools": "[{}]"}\n{"prompt": "c"}\n')
    asked: list[Any] = []

    def many(rows: Any) -> list[bool]:
        asked.extend(rows)
        return [prompt != "b" for prompt, _ in rows]

    prompts = source(path, shuffle=False, tool_key="tools", keeps=fits, keeps_many=many)
    assert asked == [("a", [{"name": "t"}]), ("b", [{}]), ("c", None)]
    (first,), (second,) = prompts.next_groups(2)
    assert (first.metadata, second.metadata) == ({"tools": [{"name": "t"}]}, {})


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_prompt_that_cannot_be_counted_is_named(tmp_path, order):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "odd"}\n')

    def many(rows: Any) -> list[bool]:
        if any(prompt == "odd" for prompt, _ in rows):
            raise DataError("roles must take turns")
        return [True] * len(rows)

    with pytest.raises(DataError, match=r"odd\.jsonl, line 2: roles must take turns"):
        source(path, keeps=fits, keeps_many=many, **order).next_groups(2)


def test_images_and_the_like_come_as_they_stand(tmp_path):
    path = tmp_path / "images.jsonl"
    path.write_text('{"prompt": "a", "pictures": ["x.png"]}\n{"prompt": "b", "pictures": null}\n')
    first, second = source(path, shuffle=False, multimodal_keys=(("image", "pictures"),)).next_groups(2)
    assert (first[0].multimodal_inputs, second[0].multimodal_inputs) == ({"image": ["x.png"]}, None)
    with pytest.raises(
        DataError, match=r"images\.jsonl, line 1: no field 'photos' with what is to be image, found prompt, "
    ):
        source(path, multimodal_keys=(("image", "photos"),))


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_file_of_empty_lines_holds_no_rows_in_any_order(tmp_path, order):
    path = tmp_path / "blank.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl holds no rows\. Give a file that holds some"):
        source(path, **order).next_groups(1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.jsonl", ("a.jsonl", 0, None)),
        ("a.jsonl@[:]", ("a.jsonl", 0, None)),
        ("a.jsonl@[3:]", ("a.jsonl", 3, None)),
        ("data/*.jsonl@[:7]", ("data/*.jsonl", 0, 7)),
        ("a@b.jsonl@[3:7]", ("a@b.jsonl", 3, 7)),
    ],
)
def test_a_slice_stands_behind_the_path(text, wanted):
    assert PromptPath.read(Path(text)) == PromptPath(Path(wanted[0]), *wanted[1:])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.jsonl@[-3:]", "a slice counts rows from the start"),
        ("a.jsonl@[:-1]", "a slice counts rows from the start"),
        ("a.jsonl@[7:7]", "the slice holds no rows"),
        ("a.jsonl@[:0]", "the slice holds no rows"),
    ],
)
def test_a_slice_that_holds_nothing_or_counts_from_the_end_is_refused(text, found):
    with pytest.raises(DataError) as caught:
        PromptPath.read(Path(text))
    assert str(caught.value) == f"{text}: {found}; accepted: @[a:b] with 0 <= a < b"


def test_files_of_a_pattern_come_by_name_and_others_are_refused(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in PromptPath.read(tmp_path / "*.jsonl").files()] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(
        DataError, match=r"\*\.csv matches no file; accepted: a prompt file, or a pattern that matches some$"
    ):
        PromptPath.read(tmp_path / "*.csv").files()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is a folder without \.jsonl, \.ndjson files; accepted: a prompt file"):
        source(tmp_path / "empty")


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("*", ["a.jsonl", "b.jsonl", "c.parquet", "part-0"]),
        ("[ab]*", ["a.jsonl", "b.jsonl"]),
        ("*.txt", ["notes.txt"]),
        ("_*.jsonl", ["_draft.jsonl"]),
        (".*.jsonl", [".hidden.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "more/d.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "c.parquet", "more/d.jsonl", "part-0"]),
        ("a**.jsonl", ["a.jsonl"]),
        ("*/d.jsonl", ["link/d.jsonl", "more/d.jsonl"]),
        ("_cache/*", ["_cache/e.jsonl"]),
        ("_*/*", ["_cache/e.jsonl"]),
    ],
)
def test_a_pattern_means_what_a_reader_would_take_it_for(tmp_path, pattern, wanted):
    names = ("a.jsonl", "b.jsonl", "c.parquet", "part-0", "notes.txt", "README.md", "_draft.jsonl", ".hidden.jsonl")
    (tmp_path / "more").mkdir()
    (tmp_path / "_cache").mkdir()
    (tmp_path / ".git").mkdir()
    for name in (*names, "more/d.jsonl", "_cache/e.jsonl", ".git/f.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "more" / "up").symlink_to(tmp_path)
    (tmp_path / "more" / "up too").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "more")
    assert [
        str(file.relative_to(tmp_path)) for file in PromptPath.read(tmp_path / pattern).files(["parquet"])
    ] == wanted


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(
        DataError, match=r"rows\.jsonl is no file but a pipe or a device, whose rows come once; accepted"
    ):
        source(tmp_path / "rows.jsonl")


def test_a_relative_pattern_and_a_link_to_a_file_are_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert PromptPath.read(Path("*.jsonl")).files() == [Path("a.jsonl"), Path("b.jsonl")]


# --- The index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_index_finds_every_line(tmp_path, lines, end, monkeypatch):
    monkeypatch.setattr("slime_core.prompts.line_index.BLOCK", 1000)
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(f'{{"n": {n}}}' for n in range(lines)) + (end if lines else ""))
    table = LineTable(path)
    assert table.total() == lines
    assert [raw.content.strip() for raw in table.read(0, lines)] == [f'{{"n": {n}}}'.encode() for n in range(lines)]
    for n in range(0, lines, 7):
        (raw,) = table.read(n, n + 1)
        assert raw.content.strip() == f'{{"n": {n}}}'.encode()
    assert LineIndex.from_bytes(indexed(path).to_bytes()).nearest(lines) == table.index.nearest(lines)


def test_the_index_is_made_once_and_anew_for_a_file_that_changed(messy, cache, monkeypatch):
    source(messy, streams=True, skips_bad=True)
    (kept,) = cache.glob("*.lines")
    monkeypatch.setattr("slime_core.prompts.line_index._made", lambda path: pytest.fail(f"{path} is read again"))
    assert len(source(messy, streams=True, skips_bad=True)) == 715
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    kept.write_bytes(kept.read_bytes()[:-8])  # cut short, as by a full disk
    assert len(source(messy, streams=True, skips_bad=True)) == 715
    with messy.open("a") as file:
        file.write("\n{}")
    os.utime(messy, ns=(1, 1))
    assert len(source(messy, streams=True, skips_bad=True)) == 716


def test_a_start_in_order_reads_the_beginning_of_a_file_only(messy):
    rows = open_rows(messy, {})
    assert rows.reaches(0)
    (table,) = rows.tables
    assert table.index.frontier[0] == EVERY


# --- Mixes ------------------------------------------------------------------------------------------------------------


def test_weights_become_whole_shares_spread_evenly():
    assert (shares([0.7, 0.3]), shares([1, 1, 1])) == ([7, 3], [334, 333, 333])
    assert (spread([2, 1]), spread([1, 3])) == ([0, 1, 0], [1, 0, 1, 1])
    with pytest.raises(
        DataError, match=r"^prompt_mix: weight 0.001 of 2.001 is less than one prompt in 1000; accepted are"
    ):
        shares([2, 0.001])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_mix_gives_each_source_its_share_and_goes_on_where_it_stood(tmp_path, messy, order):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"prompt": "f{n}"}}\n' for n in range(11)))
    request = {"mix": ((messy, 0.75), (few, 0.25)), "skips_bad": True, "keeps": fits, **order}
    prompts = source(messy, **request)
    found = drawn(prompts, 88)
    assert all(sum(prompt.startswith("f") for prompt in found[start : start + 4]) == 1 for start in range(0, 88, 4))
    assert Counter(prompt for prompt in found if prompt.startswith("f")) == {f"f{n}": 2 for n in range(11)}
    prompts.put_back(prompts.next_groups(9)[3:6])
    resumed = source(messy, **request)
    resumed.restore(json.loads(json.dumps(prompts.state())))
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert len(prompts) == (693 if not order.get("streams") else 715) + 11
