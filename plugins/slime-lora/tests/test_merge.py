"""Adapters merged into the weights of a base model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.errors import ConfigError
from slime_lora import folder
from slime_lora.merge import merge, merge_folder
from slime_lora.options import LoraOptions

OPTIONS = LoraOptions(rank=1, alpha=3.0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with two weights."""
    (target := tmp_path / "base").mkdir()
    (target / "config.json").write_text("{}")
    weights = {"a.weight": torch.eye(2), "b.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(weights, target / "model.safetensors")
    return target


def adapter(target: Path, base: Path, module: str, *, rows: int = 2) -> Path:
    """A folder with the adapter of one module: B A = [[2, 4], ...]."""
    tensors = {"A": torch.tensor([[1.0, 2.0]]), "B": torch.full((rows, 1), 2.0)}
    named = [(folder.name_of(module, matrix), tensor) for matrix, tensor in tensors.items()]
    folder.write(target, named, options=OPTIONS, base=str(base))
    return target


def test_the_scaled_product_is_added_in_the_dtype_of_the_weight(base: Path, tmp_path: Path) -> None:
    merge_folder(adapter(tmp_path / "adapter", base, "b"), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["a.weight"], torch.eye(2))
    assert torch.equal(merged["b.weight"], torch.tensor([[7, 13], [7, 13]], dtype=torch.bfloat16))
    assert (tmp_path / "merged" / "config.json").is_file()


def test_a_difference_below_the_rounding_of_bfloat16_vanishes() -> None:
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    assert torch.equal(merge(weight, torch.ones(1, 1), torch.ones(1, 1), scale=1e-3), weight)


@pytest.mark.parametrize(("module", "rows"), [("c", 2), ("b", 3)])
def test_an_adapter_of_another_model_is_refused_and_leaves_no_folder(
    base: Path, tmp_path: Path, module: str, rows: int
) -> None:
    source = adapter(tmp_path / "adapter", base, module, rows=rows)
    with pytest.raises(ConfigError):
        merge_folder(source, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_exists_and_a_base_that_does_not_are_refused(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path / "adapter", base, "b")
    with pytest.raises(ConfigError):
        merge_folder(source, base)
    with pytest.raises(ConfigError):
        merge_folder(source, tmp_path / "merged", base=tmp_path / "none")
    assert {file.name for file in base.iterdir()} == {"config.json", "model.safetensors"}
