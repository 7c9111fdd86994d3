"""Prompts by their number, held or streamed: every form of file, every order, and exact resumption."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptFilter, PromptRequest, RunView
from slime_core.errors import CheckpointError, DataError
from slime_datasets.mixed import shares, spread
from slime_datasets.options import DatasetsOptions
from slime_datasets.orders import Feistel, Windows
from slime_datasets.streams import PromptStreams

ORDERS: list[dict[str, Any]] = [
    {},
    {"streaming_data": True},
    {"streaming_data": True, "shuffle_window": 100},
    {"streaming_data": True, "shuffle": False},
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


def source(path: Path, **fields: Any) -> PromptStreams:
    """Of options of the plugin and fields of a request, by their names."""
    options = {name: fields.pop(name) for name in DatasetsOptions.model_fields if name in fields}
    request = PromptRequest(path, **{"label_key": None, **fields})
    return PromptStreams(DatasetsOptions(**options), RunView(prompts=request))


def next_prompts(prompts: PromptStreams, n: int) -> list[Any]:
    return [group[0].prompt for group in prompts.next_groups(n)]


def fits(prompt: Any) -> bool:
    return not str(prompt).endswith("13")


class Fits(PromptFilter):
    """Leaves out what does not fit, and counts it in ``counts``."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self._counts = Counter[str]() if counts is None else counts

    def select(self, prompts: Any) -> list[bool]:
        return [fits(prompt) for prompt, _ in prompts]

    def count_left_out(self, reason: str, count: int) -> None:
        self._counts[reason] += count


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
    counts: Counter[str] = Counter()
    prompts = source(messy, skips_bad=True, filter=Fits(counts), **order)
    epochs = [next_prompts(prompts, 693) for _ in range(3)]
    assert all(sorted(epoch) == sorted(f"p{n}" for n in range(700) if n % 100 != 13) for epoch in epochs)
    assert counts == {"too_long": 7, "bad": 7}
    assert (epochs[0] == epochs[1]) is (order.get("shuffle") is False)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("taken", [0, 5, 500, 693, 1500])
def test_a_restored_stream_continues_with_the_same_prompts(messy, order, taken):
    counts: Counter[str] = Counter()
    request = {"skips_bad": True, "filter": Fits(), "n_samples_per_prompt": 2, **order}
    prompts = source(messy, **request)
    prompts.next_groups(taken)
    prompts.put_back(prompts.next_groups(9)[3:6])
    state = json.loads(json.dumps(prompts.state()))
    assert len(json.dumps(state)) < 2000
    resumed = source(messy, **{**request, "filter": Fits(counts)})
    resumed.restore(state)
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert counts == {"too_long": 7, "bad": 7}


@pytest.mark.parametrize("order", ORDERS[1:4], ids=str)
def test_how_prompts_are_requested_does_not_change_a_stream(messy, order):
    whole, parts = (source(messy, skips_bad=True, filter=Fits(), **order) for _ in range(2))
    assert next_prompts(whole, 1000) == [prompt for n in (3, 500, 1, 496) for prompt in next_prompts(parts, n)]


@pytest.mark.parametrize(
    "change",
    [{"seed": 3}, {"shuffle_window": 50}, {"shuffle": False, "shuffle_window": None}, {"n_samples_per_prompt": 2}],
)
def test_the_state_of_another_order_is_refused(messy, change):
    request = {"streaming_data": True, "shuffle_window": 100, "skips_bad": True}
    state = source(messy, **request).state()
    with pytest.raises(CheckpointError, match=f"{next(iter(change)).removeprefix('shuffle_')} was"):
        source(messy, **{**request, **change}).restore(state)


def test_a_file_that_changed_is_refused_by_a_stream(messy):
    state = source(messy, streaming_data=True, shuffle=False, skips_bad=True).state()
    messy.write_text(messy.read_text().replace("p699", "q699"))
    with pytest.raises(CheckpointError, match="files was"):
        source(messy, streaming_data=True, shuffle=False, skips_bad=True).restore(state)


@pytest.mark.parametrize("rows", [50, 400])
@pytest.mark.parametrize("order", [order for order in ORDERS if order.get("streaming_data")], ids=str)
def test_a_file_that_becomes_longer_or_shorter_while_it_is_read_ends_the_stream(tmp_path, order, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{n:03}"}}\n' for n in range(300)))
    prompts = source(path, **order)
    prompts.next_groups(100)
    path.write_text("".join(f'{{"prompt": "p{n:03}"}}\n' for n in range(rows)))
    with pytest.raises(DataError) as caught:
        prompts.next_groups(300)
    assert f"{path} had 5,700 bytes" in str(caught.value)


def test_a_file_that_is_gone_is_read_to_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(600)))
    prompts = source(path, streaming_data=True, shuffle=False)
    path.unlink()
    assert next_prompts(prompts, 600) == [f"p{n}" for n in range(600)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_bad_line_is_named_where_it_is_not_skipped(messy, order):
    line = r"\d+" if order.get("streaming_data") and order.get("shuffle", True) else "3"
    with pytest.raises(DataError, match=rf"messy\.jsonl, line {line}, column 1: not JSON"):
        source(messy, **order).next_groups(705)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_error_says_why_no_prompt_is_left(tmp_path, order):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "13"}\n{"prompt": "113"}')
    with pytest.raises(DataError, match="--rollout-max-prompt-len"):
        source(path, filter=Fits(), **order).next_groups(1)
    path.write_text('{"prompt": "13"}\njunk')
    with pytest.raises(DataError, match=r"\(--on-bad-data"):
        source(path, filter=Fits(), skips_bad=True, **order).next_groups(1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_prompt_that_cannot_be_counted_is_named(tmp_path, order):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "odd"}\n')

    class Odd(PromptFilter):
        def select(self, prompts: Any) -> list[bool]:
            if any(prompt == "odd" for prompt, _ in prompts):
                raise DataError("roles must take turns")
            return [True] * len(prompts)

    with pytest.raises(DataError, match=r"odd\.jsonl, line 2"):
        source(path, filter=Odd(), **order).next_groups(2)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_file_of_empty_lines_holds_no_rows_in_any_order(tmp_path, order):
    path = tmp_path / "blank.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"blank\.jsonl holds no"):
        source(path, **order).next_groups(1)


def test_the_index_is_built_once_and_again_for_a_file_that_changed(messy, cache, monkeypatch):
    source(messy, streaming_data=True, skips_bad=True)
    (kept,) = cache.glob("*.lines")
    monkeypatch.setattr("slime_datasets.lines._index_file", lambda path: pytest.fail(f"{path} is read again"))
    assert len(source(messy, streaming_data=True, skips_bad=True)) == 715
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    kept.write_bytes(kept.read_bytes()[:-8])  # cut short, as by a full disk
    assert len(source(messy, streaming_data=True, skips_bad=True)) == 715
    with messy.open("a") as file:
        file.write("\n{}")
    os.utime(messy, ns=(1, 1))
    assert len(source(messy, streaming_data=True, skips_bad=True)) == 716


# --- Mixes ------------------------------------------------------------------------------------------------------------


def test_weights_become_whole_shares_spread_evenly():
    assert (shares([0.7, 0.3]), shares([1, 1, 1])) == ([7, 3], [334, 333, 333])
    assert (spread([2, 1]), spread([1, 3])) == ([0, 1, 0], [1, 0, 1, 1])
    with pytest.raises(DataError, match=r"^prompt_mix: weight 0\.001"):
        shares([2, 0.001])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_mix_gives_each_source_its_share_and_continues_where_it_stood(tmp_path, messy, order):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"prompt": "f{n}"}}\n' for n in range(11)))
    request = {"prompt_mix": ((messy, 0.75), (few, 0.25)), "skips_bad": True, "filter": Fits(), **order}
    prompts = source(messy, **request)
    found = next_prompts(prompts, 88)
    assert all(sum(prompt.startswith("f") for prompt in found[start : start + 4]) == 1 for start in range(0, 88, 4))
    assert Counter(prompt for prompt in found if prompt.startswith("f")) == {f"f{n}": 2 for n in range(11)}
    prompts.put_back(prompts.next_groups(9)[3:6])
    resumed = source(messy, **request)
    resumed.restore(json.loads(json.dumps(prompts.state())))
    assert resumed.next_groups(900) == prompts.next_groups(900)
    assert len(prompts) == (693 if not order.get("streaming_data") else 715) + 11
