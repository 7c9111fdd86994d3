"""Cursors that an older version wrote into checkpoints: its code made ``cursors.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.errors import CheckpointError

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("cursors.json").read_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, OLD["rows"])))
    return path


def source(file: Path, *, seed: int = 11) -> PromptFiles:
    return PromptFiles(None, RunView(prompts=PromptRequest(path=file, n_samples_per_prompt=2, seed=seed)))


def test_an_old_cursor_continues_with_the_prompts_that_its_version_handed_out_next(file):
    prompts = source(file)
    prompts.restore(OLD["cursor"])
    found = [(group[0].group_index, group[0].index, group[0].prompt) for group in prompts.next_groups(9)]
    assert found == [tuple(group) for group in OLD["then"]]


def test_an_old_cursor_of_other_prompts_or_settings_is_refused_with_what_differs(file):
    with pytest.raises(CheckpointError, match=r": seed was 11, is 12\."):
        source(file, seed=12).restore(OLD["cursor"])
    file.write_text(file.read_text().replace("p3", "p9"))
    with pytest.raises(CheckpointError, match=r": digest was 166556\w+, is \w+\."):
        source(file).restore(OLD["cursor"])
