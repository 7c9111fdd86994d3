"""The requeue buffer: aborted groups come before new prompts, and both are in the journal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slime_core import RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.plugins.contracts import PromptRequest
from slime_core.rollout.group_scheduler import RequeueBuffer
from slime_core.track.ledger import Journal, Recount
from slime_core.types import LogProbs, PromptGroup, Status, TokenIds


@pytest.fixture
def supply(tmp_path: Path):
    """Makes a supply of two prompts, two samples each, whose journal lies in ``tmp_path``."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "2"}\n')

    def make(*, holds: bool = True) -> RequeueBuffer:
        request = PromptRequest(path, n_samples_per_prompt=2, shuffle=False)
        return RequeueBuffer(PromptFiles(None, RunView(prompts=request)), Journal(tmp_path), holds=holds)

    return make


def numbers(groups: list[PromptGroup]) -> list[int | None]:
    return [group[0].group_index for group in groups]


def end(group: PromptGroup, *, length: int = 2) -> PromptGroup:
    for sample in group:
        sample.status, sample.response_length = Status.ABORTED, length
        sample.tokens, sample.rollout_log_probs = TokenIds(range(length + 1)), LogProbs([-0.5] * length)
    return group


def test_an_ended_group_comes_first_with_its_tokens(supply, tmp_path):
    source = supply()
    first, _second = source.next_groups(2)
    source.put_back([end(first)])
    assert source.held == {0: [0, 1]}
    again, fresh = source.next_groups(2)
    assert again is first
    assert numbers([again, fresh]) == [0, 2]
    assert again[0].tokens == [0, 1, 2]
    found = Recount(tmp_path)
    found.read()
    assert (found.open.keys(), found.returned) == ({0, 1, 2}, set())


@pytest.mark.parametrize("case", ["does not hold", "no tokens", "finished"])
def test_any_other_group_goes_back_to_the_source(supply, tmp_path, case):
    source = supply(holds=case != "does not hold")
    (group,) = source.next_groups(1)
    end(group, length=0 if case == "no tokens" else 2)
    for sample in group:
        sample.status = Status.COMPLETED if case == "finished" else sample.status
    source.put_back([group])
    found = Recount(tmp_path)
    found.read()
    assert (source.held, found.open, found.returned) == ({}, {}, {0})
    assert [sample.status for sample in source.next_groups(1)[0]] == [Status.PENDING] * 2


def test_held_groups_survive_a_restart(supply):
    source = supply()
    first, _ = source.next_groups(2)
    source.put_back([end(first)])
    resumed = supply()
    resumed.restore(json.loads(json.dumps(source.state())))
    again, fresh = resumed.next_groups(2)
    assert again == first
    assert (again[0].tokens, list(again[0].rollout_log_probs or ())) == ([0, 1, 2], [-0.5, -0.5])
    assert numbers([fresh]) == [2]


def test_without_held_groups_the_state_is_the_sources(supply):
    source = supply()
    source.next_groups(1)
    assert source.state()["next"] == 1
    resumed = supply()
    resumed.restore(source.state())
    assert numbers(resumed.next_groups(1)) == [1]


def test_a_held_group_keeps_its_images_in_a_checkpoint(supply):
    source = supply()
    (group,) = source.next_groups(1)
    for sample in end(group):
        sample.multimodal_train_inputs = {"pixels": np.ones((2, 3), np.float16)}
    source.put_back([group])
    resumed = supply()
    resumed.restore(json.loads(json.dumps(source.state())))
    (again,) = resumed.next_groups(1)
    pixels = again[1].multimodal_train_inputs["pixels"]
    assert (pixels.dtype, pixels.tolist()) == (np.float16, [[1, 1, 1]] * 2)
    assert again[1].tokens == [0, 1, 2]


def test_a_held_group_that_json_cannot_carry_starts_over_after_a_restart(supply):
    source = supply()
    (group,) = source.next_groups(1)
    group[0].multimodal_inputs = object()
    source.put_back([end(group)])
    resumed = supply()
    resumed.restore(source.state())
    (again,) = resumed.next_groups(1)
    assert [(one.group_index, one.index, one.prompt, one.status) for one in again] == [
        (0, 0, "a", Status.PENDING),
        (0, 1, "a", Status.PENDING),
    ]
