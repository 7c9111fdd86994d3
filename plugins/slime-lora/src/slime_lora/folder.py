"""Adapters in the format of peft: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from slime_core.errors import ConfigError
from slime_lora.options import LoraOptions

__all__ = ["name_of", "read", "write"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


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


def read(path: Path, *, options: LoraOptions, modules: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the matrices in the folder ``path``, by ``MODULE.A`` and ``MODULE.B``.

    Arguments:
        options: of the run; the folder must have the same rank and scale.
        modules: that have an adapter in the run; the folder must have the same.

    Raises:
        ConfigError: the folder is not an adapter, or has another rank, scale or other modules.
    """
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"--lora-load {path} is not a folder of peft: {error}") from error
    _require_same_scale(path, config, options)
    stored = {f"{_module_of(name)}.{name.removesuffix('.weight')[-1]}": tensor for name, tensor in tensors.items()}
    expected = {f"{module}.{matrix}" for module in modules for matrix in "AB"}
    if stored.keys() != expected:
        missing, extra = sorted(expected - stored.keys()), sorted(stored.keys() - expected)
        raise ConfigError(
            f"--lora-load {path} has adapters of other modules than this run: it lacks {missing[:3]} and adds "
            f"{extra[:3]}. Give an adapter of the same base model, and its modules as --lora-target-modules"
        )
    return stored


def _require_same_scale(path: Path, config: Mapping[str, Any], options: LoraOptions) -> None:
    rank, alpha, rs = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora"))
    is_same = rank == options.rank and isinstance(alpha, int | float) and math.isclose(alpha, options.alpha)
    if not is_same or rs != options.rs or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ConfigError(
            f"--lora-load {path} has rank {rank}, alpha {alpha} and rsLoRA {rs}; this run has {options.rank}, "
            f"{options.alpha:g} and {options.rs}. Give the same --lora-rank, --lora-alpha and --lora-rs"
        )


def _module_of(name: str) -> str:
    return name.removeprefix(PREFIX).rpartition(".lora_")[0]
