"""Folders of Hugging Face: what engines expect of them, and what a run writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import WeightSyncError
from slime_core.weights import hugging_face
from slime_core.weights.hugging_face import WeightSpec, expected_specs, require_complete_files
from slime_core.weights.publisher import require_matching_specs

TEMPLATE, NAME = ARITHMETIC / "model", "model.safetensors"
NORM = WeightSpec("norm", "float32", (4,))
HEAD = WeightSpec("lm_head.weight", "float32", (8, 4))
EXPECTED = {spec.name: spec for spec in (NORM, HEAD)}


def test_expected_weights_are_read_off_the_headers_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    save_file({"norm": torch.zeros(4)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({"lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "unlisted.safetensors")
    index = {"weight_map": {"norm": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    half = WeightSpec("lm_head.weight", "bfloat16", (8, 4))
    assert expected_specs(tmp_path) == {"norm": NORM, "lm_head.weight": half}


@pytest.mark.parametrize("check", [expected_specs, require_complete_files])
def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path: Path, check: Callable[[Path], object]) -> None:
    with pytest.raises(WeightSyncError, match=r"no \*\.safetensors file"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ([NORM], "missing: lm_head.weight"),
        ([NORM, HEAD, WeightSpec("new", "float32", (1,))], "unknown .*: new"),
        ([NORM, WeightSpec("lm_head.weight", "float32", (4, 8))], r"float32\[4, 8\] .*float32\[8, 4\]"),
        ([NORM, WeightSpec("lm_head.weight", "float16", (8, 4))], r"wrong dtype: lm_head.weight"),
        ([NORM, HEAD, NORM], "twice: norm"),
        (  # all at once
            [WeightSpec("norm", "float32", (5,)), WeightSpec("x", "float32", (1,))],
            r"missing: lm_head.weight; unknown .*: x; wrong shape: norm",
        ),
    ],
)
def test_each_mistake_is_named(sent: list[WeightSpec], complaint: str) -> None:
    with pytest.raises(WeightSyncError, match=complaint):
        require_matching_specs(sent, EXPECTED)


def test_other_orders_dtypes_of_the_engine_and_a_tied_output_weight_are_accepted() -> None:
    require_matching_specs([HEAD, NORM], EXPECTED)
    require_matching_specs([NORM], EXPECTED, tied=True)
    require_matching_specs([NORM, HEAD], {"norm": NORM}, tied=True)
    half = {name: WeightSpec(name, "bfloat16", spec.shape) for name, spec in EXPECTED.items()}
    require_matching_specs([NORM, HEAD], half, dtype="float32")


# --- Complete files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TEMPLATE / NAME, tmp_path)
    return tmp_path


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_file_of_another_length_than_its_header_says_is_refused(folder: Path, difference: int) -> None:
    size = (folder / NAME).stat().st_size
    os.truncate(folder / NAME, size + difference)
    with pytest.raises(WeightSyncError, match=NAME):
        require_complete_files(folder)


@pytest.mark.parametrize("content", [b"", b"\x05" + bytes(7) + b"oops!", b"\x02" + bytes(7) + b"[]", b"\xff" * 9])
@pytest.mark.parametrize("check", [expected_specs, require_complete_files])
def test_a_malformed_safetensors_file_is_refused(folder: Path, check: Callable[[Path], object], content: bytes) -> None:
    (folder / NAME).write_bytes(content)
    with pytest.raises(WeightSyncError, match=NAME):
        check(folder)


# --- Written folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: torch.flip(weight, (0,)) for name, weight in load_file(TEMPLATE / NAME).items()}


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
