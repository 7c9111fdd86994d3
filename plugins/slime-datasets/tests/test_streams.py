"""Prompts by their number, held or streamed: every order, exact resumption, mixes, and rows that are left out."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.errors import CheckpointError, DataError
from slime_core.provisional import PromptFilter, PromptRequest
from slime_core.rollout.prompt_filter import RunFilter
from slime_core.rollout.row_checks import RowChecks
from slime_datasets.buffer import BufferedPrompts
from slime_datasets.lines import EVERY, LineTable, from_bytes, indexed, to_bytes
from slime_datasets.mixed import shares, spread
from slime_datasets.options import DatasetsOptions
from slime_datasets.orders import Feistel, Windows
from slime_datasets.prompt_files import PromptFiles
from slime_datasets.tables import Rows


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


def write(path: Path, names: list[str]) -> Path:
    path.write_text("".join(f'{{"prompt": "{name}"}}\n' for name in names))
    return path


def next_prompts(prompts: PromptFiles, n: int) -> list[Any]:
    return [group[0].prompt for group in prompts.next_groups(n)]


def stored(prompts: PromptFiles) -> dict[str, Any]:
    """The state as a checkpoint holds it."""
    state: dict[str, Any] = json.loads(json.dumps(prompts.state()))
    return state


class Fits(PromptFilter):
    """Leaves out prompts that end on 13, and counts them in ``counts``."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self._counts = Counter[str]() if counts is None else counts

    def select(self, prompts: Any) -> list[bool]:
        return [not str(prompt).endswith("13") for prompt, _ in prompts]

    def count_left_out(self, reason: str, count: int) -> None:
        self._counts[reason] += count


# --- Orders and the index of lines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_an_exact_shuffle_has_every_place_once_and_depends_on_its_key(size: int) -> None:
    one, other = ([Feistel(size, key)(place) for place in range(size)] for key in ("0:0", "0:1"))
    assert sorted(one) == sorted(other) == list(range(size))
    assert size < 64 or one != other
    assert size != 5 or one == [4, 1, 2, 0, 3]  # on every machine


def test_rows_come_everywhere_in_an_exact_shuffle() -> None:
    at_first = Counter(Feistel(4, f"{seed}:0")(0) for seed in range(400))
    assert all(70 <= at_first[row] <= 130 for row in range(4))


def test_windows_shuffle_neighbours_only() -> None:
    order = Windows(10, "0:0")
    rows = [order.row(place, 25) for place in range(25)]
    assert rows != list(range(25))
    assert [*sorted(rows[:10]), *sorted(rows[10:20]), *sorted(rows[20:])] == list(range(25))


@pytest.mark.parametrize("lines", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_index_finds_every_line(tmp_path: Path, lines: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_datasets.lines.BLOCK", 1000)
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(f'{{"n": {n}}}' for n in range(lines)) + (end if lines else ""))
    table = LineTable(path)
    content = [f'{{"n": {n}}}'.encode() for n in range(lines)]
    assert table.total() == lines
    assert [raw.content.strip() for raw in table.read(0, lines)] == content
    for n in range(0, lines, 7):
        assert [raw.content.strip() for raw in table.read(n, n + 1)] == [content[n]]
    assert from_bytes(to_bytes(indexed(path))).nearest(lines) == table.index.nearest(lines)


def test_a_start_in_order_reads_the_beginning_of_a_file_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 700)
    table = LineTable(tmp_path / "rows.jsonl")
    rows = Rows([table])
    assert rows.reaches(0)
    assert table.index.frontier[0] == EVERY


def test_the_index_is_built_once_and_again_for_a_file_that_changed(source, messy, cache, monkeypatch) -> None:
    request = {"streaming_data": True, "skips_bad": True}
    source(messy, **request)
    (file,) = cache.glob("*.lines")
    with monkeypatch.context() as patch:
        patch.setattr("slime_datasets.lines._index_file", lambda path: pytest.fail(f"{path} is read again"))
        assert len(source(messy, **request)) == 715
    file.write_bytes(file.read_bytes()[:-8])  # cut short, as by a full disk
    assert len(source(messy, **request)) == 715
    with messy.open("a") as content:
        content.write("\n{}")
    os.utime(messy, ns=(1, 1))
    assert len(source(messy, **request)) == 716


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_every_prompt_that_is_kept_comes_once_an_epoch_and_the_others_are_counted_once(source, messy, order) -> None:
    counts: Counter[str] = Counter()
    prompts = source(messy, skips_bad=True, filter=Fits(counts), **order)
    epochs = [next_prompts(prompts, 693) for _ in range(3)]
    assert all(sorted(epoch) == sorted(f"p{n}" for n in range(700) if n % 100 != 13) for epoch in epochs)
    assert counts == {"too_long": 7, "bad": 7}
    assert (epochs[0] == epochs[1]) is (order.get("shuffle") is False)


@pytest.mark.parametrize("taken", [0, 500, 693, 1500])
def test_a_restored_stream_continues_with_the_same_prompts(source, messy, order, taken: int) -> None:
    counts: Counter[str] = Counter()
    request = {"skips_bad": True, "filter": Fits(), "n_samples_per_prompt": 2, **order}
    prompts = source(messy, **request)
    prompts.next_groups(taken)
    prompts.put_back(prompts.next_groups(9)[3:6])
    state = stored(prompts)
    assert len(json.dumps(state)) < 2000
    resumed = source(messy, **{**request, "filter": Fits(counts)})
    resumed.restore(state)
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert counts == {"too_long": 7, "bad": 7}


def test_how_prompts_are_requested_does_not_change_a_stream(source, messy, streamed) -> None:
    at_once, in_parts = (source(messy, skips_bad=True, filter=Fits(), **streamed) for _ in range(2))
    parts = [prompt for n in (3, 500, 1, 496) for prompt in next_prompts(in_parts, n)]
    assert next_prompts(at_once, 1000) == parts


@pytest.mark.parametrize(
    "change",
    [{"seed": 3}, {"shuffle_window": 50}, {"shuffle": False, "shuffle_window": None}, {"n_samples_per_prompt": 2}],
)
def test_the_state_of_another_order_is_refused(source, messy, change) -> None:
    request = {"streaming_data": True, "shuffle_window": 100, "skips_bad": True}
    state = source(messy, **request).state()
    with pytest.raises(CheckpointError, match=next(iter(change)).removeprefix("shuffle_")):
        source(messy, **{**request, **change}).restore(state)


def test_a_file_that_changed_is_refused_by_a_stream(source, messy) -> None:
    request = {"streaming_data": True, "shuffle": False, "skips_bad": True}
    state = source(messy, **request).state()
    messy.write_text(messy.read_text().replace("p699", "q699"))
    with pytest.raises(CheckpointError, match="files"):
        source(messy, **request).restore(state)


@pytest.mark.parametrize("rows", [50, 400])
def test_a_file_that_becomes_longer_or_shorter_while_it_is_read_ends_the_stream(
    source, tmp_path, streamed, rows
) -> None:
    path = write(tmp_path / "rows.jsonl", [f"p{n:03}" for n in range(300)])
    prompts = source(path, **streamed)
    prompts.next_groups(100)
    write(path, [f"p{n:03}" for n in range(rows)])
    with pytest.raises(DataError, match=r"rows\.jsonl had 5,700 bytes"):
        prompts.next_groups(300)


def test_a_file_that_is_gone_is_read_to_its_end(source, tmp_path) -> None:
    names = [f"p{n}" for n in range(600)]
    path = write(tmp_path / "rows.jsonl", names)
    prompts = source(path, streaming_data=True, shuffle=False)
    path.unlink()
    assert next_prompts(prompts, 600) == names


OLD: dict[str, Any] = json.loads(Path(__file__).with_name("cursors.json").read_text())
"""Made with the code that had mixes and streams in the core."""


@pytest.mark.parametrize("case", OLD["cases"], ids=lambda case: f"{case['options']} {case['shuffle']}")
def test_an_old_cursor_continues_with_the_prompts_that_its_version_handed_out_next(
    source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in OLD["files"].items():
        write(Path(name), [f"{name[0]}{n}" for n in range(size)])
    prompts = source(Path("a.jsonl"), seed=11, shuffle=case["shuffle"], n_samples_per_prompt=2, **case["options"])
    prompts.restore(case["cursor"])
    assert [[group[0].group_index, group[0].index, group[0].prompt] for group in prompts.next_groups(9)] == case["then"]


def test_the_cursor_of_another_data_source_is_refused(tmp_path: Path) -> None:
    run = RunView(prompts=PromptRequest(write(tmp_path / "prompts.jsonl", ["a"]), label_key=None))
    with pytest.raises(CheckpointError, match="--data-source"):
        BufferedPrompts(DatasetsOptions(), run).restore({"next": 1, "returned": []})


# --- Mixes ------------------------------------------------------------------------------------------------------------


def test_weights_become_integer_shares_spread_evenly() -> None:
    assert (shares([0.7, 0.3]), shares([1, 1, 1])) == ([7, 3], [334, 333, 333])
    assert (spread([2, 1]), spread([1, 3])) == ([0, 1, 0], [1, 0, 1, 1])
    with pytest.raises(DataError, match=r"weight 0\.001"):
        shares([2, 0.001])


def test_a_mix_gives_each_source_its_share_and_continues_where_it_was(source, tmp_path, messy, order) -> None:
    few = write(tmp_path / "few.jsonl", [f"f{n}" for n in range(11)])
    request = {"prompt_mix": ((messy, 0.75), (few, 0.25)), "skips_bad": True, "filter": Fits(), **order}
    prompts = source(messy, **request)
    names = next_prompts(prompts, 88)
    assert all(sum(name.startswith("f") for name in names[start : start + 4]) == 1 for start in range(0, 88, 4))
    assert Counter(name for name in names if name.startswith("f")) == {f"f{n}": 2 for n in range(11)}
    prompts.put_back(prompts.next_groups(9)[3:6])
    resumed = source(messy, **request)
    resumed.restore(stored(prompts))
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert len(prompts) == (693 if not order.get("streaming_data") else 715) + 11


# --- Rows that cannot be used -----------------------------------------------------------------------------------------


def test_a_bad_line_is_named_if_it_is_not_skipped(source, messy, order) -> None:
    line = r"\d+" if order.get("streaming_data") and order.get("shuffle", True) else "3"
    with pytest.raises(DataError, match=rf"messy\.jsonl, line {line}, column 1"):
        source(messy, **order).next_groups(705)


def test_an_error_names_the_setting_if_no_prompt_is_left(source, tmp_path, order) -> None:
    path = write(tmp_path / "long.jsonl", ["13", "113"])
    with pytest.raises(DataError, match="--rollout-max-prompt-len"):
        source(path, filter=Fits(), **order).next_groups(1)
    path.write_text('{"prompt": "13"}\njunk')
    with pytest.raises(DataError, match="--on-bad-data"):
        source(path, filter=Fits(), skips_bad=True, **order).next_groups(1)
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"long\.jsonl"):
        source(path, **order).next_groups(1)


def test_a_prompt_that_cannot_be_counted_is_named(source, tmp_path, order) -> None:
    class Odd(PromptFilter):
        def select(self, prompts: Any) -> list[bool]:
            if any(prompt == "odd" for prompt, _ in prompts):
                raise DataError("roles must take turns")
            return [True] * len(prompts)

    path = write(tmp_path / "odd.jsonl", ["a", "odd"])
    with pytest.raises(DataError, match=r"odd\.jsonl, line 2"):
        source(path, filter=Odd(), **order).next_groups(2)


def test_every_row_that_is_skipped_is_explained_once_with_file_and_line(source, tmp_path: Path, order) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\njunk\n\n{"prompt": ""}\n{"prompt": "b"}\n')
    left_out = RunFilter(bad_rows=tmp_path / "bad-rows.log")
    prompts = source(path, skips_bad=True, filter=left_out, **order)
    assert sorted(next_prompts(prompts, 6)) == ["a", "a", "a", "b", "b", "b"]
    second, fourth = sorted((tmp_path / "bad-rows.log").read_text().splitlines())
    assert second.startswith(f"{path}, line 2, column 1: ")
    assert fourth.startswith(f"{path}, line 4: ")
    (report,) = left_out.news()
    assert sorted(line[: len(str(path)) + 10] for line in report.split("\n")[1:]) == [
        f"  {path}, line {line}" for line in (2, 4)
    ]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rm_type": "maths"}, "metadata rm_type = 'maths'"),
        ({"level": "hard"}, "metadata level = 'hard' is too hard"),
        ({"sampling_params": {"temperature": 2}}, "metadata sampling_params: temperature = 2.0"),
    ],
    ids=str,
)
def test_a_row_that_names_what_the_run_lacks_is_a_bad_row(source, tmp_path: Path, order, metadata, named) -> None:
    def mistakes(row: Any) -> Iterator[str]:
        if row.get("level") == "hard":
            yield "metadata level = 'hard' is too hard"

    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "metadata": {"rm_type": "math", "level": "easy"}}
    rows = [*[good] * 60, {"prompt": "b", "metadata": metadata}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    checks = RowChecks({"rm_type": {"math": ""}}, {"temperature": 1.0}, mistakes)
    left_out = RunFilter(checks, bad_rows=tmp_path / "bad-rows.log")
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}, line 61: {named}')}"):
        source(path, filter=left_out, **order).next_groups(61)
    assert next_prompts(source(path, filter=left_out, skips_bad=True, **order), 61) == ["a"] * 61
    assert left_out.metrics() == {"data/left_out/bad": 1.0}
    assert (tmp_path / "bad-rows.log").read_text().startswith(f"{path}, line 61: {named}")
