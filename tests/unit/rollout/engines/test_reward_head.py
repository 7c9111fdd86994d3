"""Checkpoints of reward models whose head SGLang would leave random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_core.rollout.engines.fleet import with_head_bias

QWEN = "Qwen3ForSequenceClassification"
HEAD = {"score.weight": np.ones((1, 4), np.float32)}


def checkpoint(folder: Path, weights: dict[str, Any], architecture: str = QWEN) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    save_file({"model.norm.weight": np.ones(4, np.float32), **weights}, folder / "model.safetensors")
    return folder


def test_a_head_without_a_bias_is_served_with_one_of_zero(tmp_path):
    model = checkpoint(tmp_path / "model", HEAD)
    served = with_head_bias(model, tmp_path / "served")
    assert served == tmp_path / "served"
    found = {name: weight for file in served.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert sorted(found) == ["model.norm.weight", "score.bias", "score.weight"]
    assert found["score.bias"].tolist() == [0.0]
    assert (served / "config.json").read_text() == (model / "config.json").read_text()
    assert sorted(file.name for file in model.iterdir()) == ["config.json", "model.safetensors"]


def test_a_list_of_files_names_the_added_one_and_the_checkpoint_keeps_its_own(tmp_path):
    model = checkpoint(tmp_path / "model", HEAD)
    listed = {"weight_map": {"score.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(listed))
    for _ in range(2):  # a resumed run finds the folder already there
        served = with_head_bias(model, tmp_path / "served")
    content = json.loads((served / "model.safetensors.index.json").read_text())
    assert content["weight_map"] == {
        "score.weight": "model.safetensors",
        "score.bias": "model-score-bias.safetensors",
    }
    assert json.loads((model / "model.safetensors.index.json").read_text()) == listed


@pytest.mark.parametrize(
    ("weights", "architecture"),
    [
        ({**HEAD, "score.bias": np.ones(1, np.float32)}, QWEN),
        (HEAD, "LlamaForSequenceClassification"),
        ({}, QWEN),
    ],
)
def test_any_other_checkpoint_is_served_as_it_is(tmp_path, weights, architecture):
    model = checkpoint(tmp_path / "model", weights, architecture)
    assert with_head_bias(model, tmp_path / "served") == model
    assert not (tmp_path / "served").exists()


def test_a_folder_that_holds_no_readable_weights_is_left_to_sglang(tmp_path):
    model = checkpoint(tmp_path / "model", HEAD)
    (model / "model.safetensors").write_text("no weights")
    assert with_head_bias(model, tmp_path / "served") == model
