"""Adapters in peft's format: what is written is read back, and what does not fit the run is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime_core.errors import ConfigError
from slime_lora import folder
from slime_lora.options import LoraOptions

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
OPTIONS = LoraOptions(rank=2, alpha=3.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with adapters of two modules."""
    tensors = [
        (folder.name_of(module, matrix), torch.full(shape, float(number)))
        for number, module in enumerate(MODULES)
        for matrix, shape in (("A", (2, 6)), ("B", (4, 2)))
    ]
    folder.write(tmp_path / "adapter", tensors, options=OPTIONS, base="BASE")
    return tmp_path / "adapter"


def test_what_is_written_is_read(path: Path) -> None:
    stored = folder.read(path, options=OPTIONS, modules=MODULES)
    assert stored.keys() == {f"{module}.{matrix}" for module in MODULES for matrix in "AB"}
    assert torch.equal(stored[f"{MODULES[1]}.B"], torch.ones(4, 2))


def test_the_configuration_names_base_scale_and_modules(path: Path) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == ("BASE", 2, 3.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize("changes", [{"rank": 4}, {"alpha": 2.0}, {"rs": True}], ids=str)
def test_another_scale_is_refused(path: Path, changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        folder.read(path, options=OPTIONS.model_copy(update=changes), modules=MODULES)


@pytest.mark.parametrize("modules", [MODULES[:1], (*MODULES, "model.layers.1.mlp.up_proj")], ids=len)
def test_adapters_of_other_modules_are_refused(path: Path, modules: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        folder.read(path, options=OPTIONS, modules=modules)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_folder_that_is_no_adapter_is_refused(path: Path, file: str, content: bytes | None) -> None:
    (path / file).unlink()
    if content is not None:
        (path / file).write_bytes(content)
    with pytest.raises(ConfigError):
        folder.read(path, options=OPTIONS, modules=MODULES)
