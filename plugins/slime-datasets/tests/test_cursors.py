"""Places in the data that another data source wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core import PromptRequest, RunView
from slime_core.errors import CheckpointError
from slime_datasets.buffer import BufferedPrompts
from slime_datasets.options import DatasetsOptions


def test_the_cursor_of_prompts_is_none_of_a_buffered_source(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "label": "b"}\n')
    buffered = BufferedPrompts(DatasetsOptions(), RunView(prompts=PromptRequest(file)))
    with pytest.raises(CheckpointError, match="has no buffer, so another data source wrote it; resume with the"):
        buffered.restore({"next": 1, "returned": []})
