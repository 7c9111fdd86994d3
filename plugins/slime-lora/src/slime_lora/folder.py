"""Adapters in the format of peft: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from slime_core.errors import ConfigError
from slime_lora.options import LoraOptions

__all__ = ["AdapterConfig", "load", "name_of", "read", "write"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What ``adapter_config.json`` says of all adapters of a folder.

    Arguments:
        rank: of every adapter.
        alpha, rs: adapters are multiplied by alpha / rank, with ``rs`` by alpha / sqrt(rank).
        base: name or folder of the base model.
    """

    rank: int
    alpha: float
    rs: bool
    base: str | None

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices of an adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


def name_of(module: str, matrix: str) -> str:
    """Return peft's name of a matrix, ``A`` or ``B``, of the adapter of ``module``."""
    return f"{PREFIX}{module}.lora_{matrix}.weight"


def write(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], *, options: LoraOptions, base: str) -> None:
    """Create the folder ``path`` and write an adapter that ``peft.PeftModel.from_pretrained`` loads.

    Arguments:
        tensors: with names of :func:`name_of`.
        base: name or folder of the base model.

    Raises:
        OSError: the folder exists, or a file cannot be written.
    """
    path.mkdir()
    modules = {_module_of(name) for name, _ in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "use_rslora": options.rs,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    content = save({name: tensor.contiguous() for name, tensor in tensors}, metadata={"format": "pt"})
    (path / WEIGHTS).write_bytes(content)


def load(path: Path) -> tuple[AdapterConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the matrices in the folder ``path``, by ``MODULE.A`` and ``MODULE.B``.

    Raises:
        ConfigError: the folder is not an adapter, or its adapters have different ranks or scales.
    """
    try:
        stored = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config = _config_of(stored)
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a folder of peft with adapters: {error!r}") from error
    if stored.get("rank_pattern") or stored.get("alpha_pattern") or stored.get("modules_to_save"):
        raise ConfigError(f"{path} has adapters of several ranks or scales, or trained modules; one of each is read")
    return config, {f"{_module_of(name)}.{name.removesuffix('.weight')[-1]}": tensors[name] for name in tensors}


def _config_of(stored: dict[str, Any]) -> AdapterConfig:
    rank, alpha = int(stored["r"]), float(stored["lora_alpha"])
    if stored["peft_type"] != "LORA" or rank < 1:
        raise ValueError(f"peft_type {stored['peft_type']!r} of rank {rank}")
    return AdapterConfig(rank, alpha, bool(stored.get("use_rslora")), stored.get("base_model_name_or_path"))


def read(path: Path, *, options: LoraOptions, modules: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the matrices in the folder ``path`` for a run.

    Arguments:
        options: of the run; the folder must have the same rank and scale.
        modules: that have an adapter in the run; the folder must have the same.

    Raises:
        ConfigError: the folder is not an adapter, or has another rank, scale or other modules.
    """
    config, tensors = load(path)
    if config.rank != options.rank or not math.isclose(config.scale, options.scale):
        raise ConfigError(
            f"--lora-load {path} has rank {config.rank}, alpha {config.alpha:g} and rsLoRA {config.rs}; this run has "
            f"{options.rank}, {options.alpha:g} and {options.rs}. Give the same --lora-rank, --lora-alpha and --lora-rs"
        )
    expected = {f"{module}.{matrix}" for module in modules for matrix in "AB"}
    if tensors.keys() != expected:
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise ConfigError(
            f"--lora-load {path} has adapters of other modules than this run: it lacks {missing[:3]} and adds "
            f"{extra[:3]}. Give an adapter of the same base model, and its modules as --lora-target-modules"
        )
    return tensors


def _module_of(name: str) -> str:
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]
