"""The prompts of a run: their order, their numbers, and the state of their source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView, Sample
from slime_core.errors import CheckpointError, RunError
from slime_core.provisional import PromptFilter, PromptRequest
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"p{number}", "label": str(number), "metadata": {"n": number}} for number in range(7)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class WithoutP3(PromptFilter):
    def select(self, prompts):
        return [prompt != "p3" for prompt, _ in prompts]


def source(file: Path, **request) -> PromptFiles:
    return PromptFiles(DatasetsOptions(), RunView(prompts=PromptRequest(path=file, **request)))


def texts(groups) -> list[str]:
    return [group[0].prompt for group in groups]


def test_a_group_holds_samples_of_one_prompt_numbered_through_the_run(file):
    prompts = source(file, shuffle=False, n_samples_per_prompt=3)
    _, second = prompts.next_groups(2)
    assert [(s.group_index, s.index, s.prompt, s.label, s.metadata) for s in second] == [
        (1, 3, "p1", "1", {"n": 1}),
        (1, 4, "p1", "1", {"n": 1}),
        (1, 5, "p1", "1", {"n": 1}),
    ]
    second[0].metadata["seen"] = True
    assert second[1].metadata == {"n": 1}


def test_samples_of_a_prompt_share_neither_messages_nor_nested_metadata_in_any_epoch(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "q"}], "metadata": {"tools": ["a"]}}))
    prompts = source(path, n_samples_per_prompt=2, label_key=None)
    (first,) = prompts.next_groups(1)
    first[0].prompt.append({"role": "assistant", "content": "leak"})
    first[0].prompt[0]["content"] = "other"
    first[0].metadata["tools"].append("b")
    for clean in (first[1], *prompts.next_groups(1)[0]):
        assert (clean.prompt, clean.metadata) == ([{"role": "user", "content": "q"}], {"tools": ["a"]})


def test_the_order_is_that_of_the_seed_and_the_same_on_every_machine(file):
    assert texts(source(file, seed=1).next_groups(7)) == texts(source(file, seed=1).next_groups(7))
    assert texts(source(file, seed=1).next_groups(7)) != texts(source(file, seed=2).next_groups(7))
    assert texts(source(file, seed=0).next_groups(7)) == ["p2", "p3", "p1", "p0", "p6", "p5", "p4"]


def test_groups_that_are_put_back_come_first_under_their_old_numbers_as_new_samples(file):
    prompts = source(file, n_samples_per_prompt=2)
    first = prompts.next_groups(4)
    first[1][0].response = "half"
    prompts.put_back([first[3], first[1]])
    again = prompts.next_groups(3)
    assert [group[0].group_index for group in again] == [3, 1, 4]
    assert [sample.index for sample in again[1]] == [2, 3]
    assert texts(again[:2]) == texts([first[3], first[1]])
    assert again[1][0].response == ""


@pytest.mark.parametrize("group", [[Sample(prompt="p0")], []], ids=["no number", "no sample"])
def test_a_group_that_is_put_back_without_a_number_is_refused(file, group):
    prompts = source(file)
    good = prompts.next_groups(1)
    with pytest.raises(RunError, match="group_index"):
        prompts.put_back([*good, group])
    assert prompts.state()["returned"] == []


def test_a_restored_source_continues_where_the_state_was_taken(file):
    prompts = source(file)
    prompts.put_back(prompts.next_groups(9)[5:7])
    state = json.loads(json.dumps(prompts.state()))
    resumed = source(file)
    resumed.restore(state)
    assert (state["next"], state["returned"], state["prompts"]) == (9, [5, 6], 7)
    assert resumed.next_groups(12) == prompts.next_groups(12)


@pytest.mark.parametrize(
    ("request_", "differs"),
    [
        ({"seed": 2}, "seed was 1, is 2"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"n_samples_per_prompt": 4}, "n_samples_per_prompt was 1, is 4"),
        ({"filter": WithoutP3()}, "prompts was 7, is 6; digest was "),
        ({"label_key": None}, "digest was "),
    ],
)
def test_a_state_that_would_mean_other_prompts_is_refused_with_what_differs(file, request_, differs):
    state = source(file, seed=1).state()
    with pytest.raises(CheckpointError, match=f": {differs}"):
        source(file, **{"seed": 1, **request_}).restore(state)


OLD: dict[str, Any] = json.loads(Path(__file__).with_name("old_cursors.json").read_text())
"""What the code of an older version wrote into checkpoints."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, OLD["rows"])))
    return path


def test_an_old_cursor_continues_with_the_prompts_that_its_version_handed_out_next(old: Path) -> None:
    prompts = source(old, n_samples_per_prompt=2, seed=11)
    prompts.restore(OLD["cursor"])
    groups = [(group[0].group_index, group[0].index, group[0].prompt) for group in prompts.next_groups(9)]
    assert groups == [tuple(group) for group in OLD["then"]]


def test_an_old_cursor_of_other_prompts_or_settings_is_refused_with_what_differs(old: Path) -> None:
    with pytest.raises(CheckpointError, match=r": seed was 11, is 12\."):
        source(old, n_samples_per_prompt=2, seed=12).restore(OLD["cursor"])
    old.write_text(old.read_text().replace("p3", "p9"))
    with pytest.raises(CheckpointError, match=r": digest was 166556\w+, is \w+\."):
        source(old, n_samples_per_prompt=2, seed=11).restore(OLD["cursor"])


def test_every_prompt_comes_once_an_epoch_in_a_new_order(file):
    prompts = source(file)
    epochs = [texts(prompts.next_groups(7)) for _ in range(4)]
    assert all(sorted(epoch) == [f"p{number}" for number in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_how_prompts_are_requested_does_not_change_their_order(file):
    whole, parts = source(file), source(file)
    assert texts(whole.next_groups(20)) == [text for n in (3, 9, 1, 7) for text in texts(parts.next_groups(n))]


def test_more_put_back_than_requested_wait_for_the_next_call(file):
    prompts = source(file)
    prompts.put_back(prompts.next_groups(3))
    assert [group[0].group_index for group in prompts.next_groups(2)] == [0, 1]
    assert [group[0].group_index for group in prompts.next_groups(2)] == [2, 3]
