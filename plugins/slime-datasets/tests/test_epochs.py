"""``--num-epoch``: how many rollouts a run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import resolve
from slime_core.errors import ConfigError
from slime_datasets.plugin import DEFAULT_PROMPTS

ROWS = 100


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * ROWS)
    return ["--plugin", "grpo", "--prompt-data", str(tmp_path / "train.jsonl")]


@pytest.mark.parametrize(
    ("flags", "rollouts"),
    [
        ("--num-epoch 3", 3 * ROWS // DEFAULT_PROMPTS),
        ("--num-epoch 3 --rollout-batch-size 20", 15),
        ("--num-epoch 1 --rollout-batch-size 200", 1),
        ("--num-epoch 3 --num-rollout 7", 7),
    ],
)
def test_the_rollouts_follow_from_the_rows_unless_they_are_set(line: list[str], flags: str, rollouts: int) -> None:
    resolved, _ = resolve([*line, *flags.split()])
    assert resolved.config.rollout.num_rollout == rollouts
    if "--rollout-batch-size" not in flags:
        assert resolved.config.rollout.rollout_batch_size == DEFAULT_PROMPTS


def test_a_slice_counts_its_rows(line: list[str]) -> None:
    resolved, _ = resolve([*line[:-1], f"{line[-1]}@[:40]", "--num-epoch", "2", "--rollout-batch-size", "10"])
    assert resolved.config.rollout.num_rollout == 8


@pytest.mark.parametrize("flags", ["--num-epoch 3", "--num-epoch 3 --prompt-mix a.jsonl 1", "--num-epoch 0"])
def test_epochs_need_one_source_of_prompts(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["--plugin", "grpo", *flags.split()])
    assert "epoch" in str(caught.value)
