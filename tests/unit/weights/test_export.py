from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_core.weights import hugging_face

TEMPLATE = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: torch.flip(weight, (0,)) for name, weight in load_file(TEMPLATE / "model.safetensors").items()}


def test_transformers_loads_the_folder_with_equal_weights_and_tokenizer(tmp_path, weights):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hugging_face.write(tmp_path / "hf", weights.items(), template=TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("1+1")["input_ids"] == [6, 15, 6]


def test_large_weights_are_cut_into_files_with_an_index(tmp_path, weights, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 100_000)
    hugging_face.write(tmp_path / "hf", weights.items(), template=TEMPLATE)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 100_000 for file in files)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_weights_are_copied_when_they_come(tmp_path):
    live = torch.zeros(3)

    def gathered():
        for number in range(2):
            live.fill_(number)
            yield f"weight{number}", live

    hugging_face.write(tmp_path / "hf", gathered(), template=TEMPLATE)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: weight.tolist() for name, weight in written.items()} == {"weight0": [0] * 3, "weight1": [1] * 3}
