"""Places in the data that earlier versions, or another data source, wrote into checkpoints.

``cursors.json`` was made with the code that had mixes and streams in the core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, RunView
from slime_core.errors import CheckpointError
from slime_datasets.buffer import BufferedPrompts
from slime_datasets.options import DatasetsOptions
from slime_datasets.streams import PromptStreams

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("cursors.json").read_text())


@pytest.mark.parametrize("case", OLD["cases"], ids=lambda case: f"{case['options']} {case['shuffle']}")
def test_an_old_cursor_continues_with_the_prompts_that_its_version_handed_out_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, size in OLD["files"].items():
        Path(name).write_text("".join(json.dumps({"prompt": f"{name[0]}{n}"}) + "\n" for n in range(size)))
    request = PromptRequest(Path("a.jsonl"), label_key=None, seed=11, shuffle=case["shuffle"], n_samples_per_prompt=2)
    prompts = PromptStreams(DatasetsOptions(**case["options"]), RunView(prompts=request))
    prompts.restore(case["cursor"])
    found = [[group[0].group_index, group[0].index, group[0].prompt] for group in prompts.next_groups(9)]
    assert found == case["then"]


def test_the_cursor_of_prompts_is_none_of_a_buffered_source(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "label": "b"}\n')
    buffered = BufferedPrompts(DatasetsOptions(), RunView(prompts=PromptRequest(file)))
    with pytest.raises(CheckpointError, match="has no buffer"):
        buffered.restore({"next": 1, "returned": []})
