"""Formats of checkpoint folders, and the weights of a Hugging Face folder by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slime_core.checkpoint import CARRIED, config_folder
from slime_core.errors import CheckpointError, ConfigError
from slime_core.types import JsonValue
from slime_core.weights import WeightSpec, expected_specs, require_complete_files, weight_files

EMBEDDING, TIED = "model.embed_tokens.weight", "lm_head.weight"

MOST_BYTES = 16 * 2**20
"""Largest config.json, or file of this package, that is read."""

SHOWN = 8
"""Number of names that a message lists for each kind of difference."""


def carried_folder(folder: Path) -> Path:
    """Return the folder with the config and the tokenizer of a torch_dist folder.

    Raises:
        ConfigError: it contains none, because another program wrote it.
    """
    if (config := config_folder(folder)) is not None:
        return config
    raise ConfigError(
        f"{folder} carries no {CARRIED}/config.json, as the checkpoints of runs and of slime convert do, so the "
        "model is unknown. Give --origin-hf-dir: the Hugging Face folder that it was made from."
    )


def read_object(file: Path) -> dict[str, JsonValue] | None:
    """Return the JSON object in ``file``; None if there is none that can be read."""
    try:
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def config_of(folder: Path) -> dict[str, JsonValue]:
    """Return the object of the folder's ``config.json``.

    Raises:
        ConfigError: the file does not exist, or describes a quantised model.
    """
    config = read_object(folder / "config.json")
    if config is None:
        raise ConfigError(
            f"{folder / 'config.json'} is missing, or no JSON object; accepted: a Hugging Face folder on this machine"
        )
    if method := config.get("quantization_config"):
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise ConfigError(
            f"{folder / 'config.json'} describes quantised weights (quantization_config: {name}); converting them is "
            "not built. Give a folder with weights in bfloat16, float16 or float32."
        )
    return config


class HuggingFaceWeights:
    """The weights of a Hugging Face folder.

    Attributes:
        folder: the folder.
        specs: name -> dtype and shape. A tied model's output weight is left out, because it is the embedding.

    Raises:
        ConfigError: the folder has no config, or its weights are quantised.
        CheckpointError: a tied model's output weight differs from its embedding.
        WeightSyncError: a file is missing, incomplete, or not a safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        config = config_of(folder)
        self.folder = folder
        require_complete_files(folder)
        self._files = {name: file for file in weight_files(folder) for name in _names(file)}
        self.specs: dict[str, WeightSpec] = expected_specs(folder)
        if config.get("tie_word_embeddings") and TIED in self.specs:
            self._refuse_untied()
            del self.specs[TIED]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype with the most bytes."""
        return main_dtype(_bytes_by_dtype(self.specs.values()))

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weights ``names``, in file-backed memory."""
        tensors = {}
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in names:
                file = self._files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                tensors[name] = opened[file].get_tensor(name)
        return tensors

    def _refuse_untied(self) -> None:
        if EMBEDDING in self.specs and not _same(*self.read([EMBEDDING, TIED]).values()):
            raise CheckpointError(
                f"{self.folder / 'config.json'} says tie_word_embeddings, but {TIED} differs from {EMBEDDING}. Set "
                "tie_word_embeddings to false if both are trained."
            )


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt", device="cpu") as opened:
        return list(opened.keys())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(_bits(a), _bits(b)))


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().reshape(-1).view(torch.uint8)


def _bytes_by_dtype(specs: Iterable[WeightSpec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.nbytes
    return sizes


def main_dtype(sizes: Mapping[str, int]) -> torch.dtype:
    """Return the floating dtype with the largest size.

    Arguments:
        sizes: torch's name of a dtype -> bytes, or elements.

    Raises:
        ConfigError: this dtype is not supported for building a model.
    """
    name = max(sizes, key=lambda dtype_name: sizes[dtype_name], default="")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"most weights have dtype {name or 'unknown'}; converting is built for float32, bfloat16 and float16"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class Differences:
    """Return the differences between two sets of weights; empty: none.

    Arguments:
        kinds: kind of difference -> texts, one for each weight.
    """

    kinds: Mapping[str, Sequence[str]]

    def __bool__(self) -> bool:
        return any(self.kinds.values())

    def __str__(self) -> str:
        return "; ".join(f"{kind}: {_listed(names)}" for kind, names in self.kinds.items() if names)


Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> shape, and torch's name of the dtype."""


def compare(stored: Shapes, expected: Shapes) -> Differences:
    """Compare names, shapes and dtypes of ``stored`` with ``expected``."""
    both = [name for name in stored if name in expected]
    return Differences(
        {
            "missing": [f"{name} {_kind(expected[name])}" for name in expected if name not in stored],
            "extra": [f"{name} {_kind(stored[name])}" for name in stored if name not in expected],
            "wrong shape": [
                f"{name} has {list(stored[name][0])}, expected {list(expected[name][0])}"
                for name in both
                if stored[name][0] != expected[name][0]
            ],
            "wrong dtype": [
                f"{name} has {stored[name][1]}, expected {expected[name][1]}"
                for name in both
                if stored[name][1] != expected[name][1]
            ],
        }
    )


def _kind(shape: tuple[tuple[int, ...], str]) -> str:
    return f"{shape[1]}{list(shape[0])}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
