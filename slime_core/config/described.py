"""What a Hugging Face folder's ``config.json`` says about its model, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config.embedded import ARITHMETIC
from slime_core.config.schema import RunConfig
from slime_core.untrusted import read_object

__all__ = ["EXPERTS", "context_length", "described", "differences", "routes_shape", "start_weights", "whole_number"]

NOT_THE_MODEL = frozenset(
    [
        *("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("max_position_embeddings", "sliding_window", "max_window_layers"),
    ]
)
"""What two config.json may differ in and still describe one model: how it was trained and saved, how far it reads, and
windows, which count only where the layers' types say so."""

LARGEST = 2**31 - 1
"""The largest size of a model's part; what is more is no size, and nothing is built from it."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json calls the number of experts: Qwen, Mixtral, DeepSeek."""


def described(folder: Path) -> dict[str, Any] | None:
    """The object in ``config.json``; None: there is none that can be read."""
    try:
        return read_object(folder / "config.json")
    except (OSError, ValueError):
        return None


def start_weights(config: RunConfig) -> Path:
    """The folder of the start weights, the user's or the embedded one."""
    return config.model.hf_checkpoint or ARITHMETIC / "model"


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, missing: bool = False) -> list[str]:
    """``name = value of a instead of value of b``, for every field that makes two configs describe different models.

    Arguments:
        missing: a field that only one of them has counts as None in the other; False: it says nothing.
    """
    names = (a.keys() | b.keys() if missing else a.keys() & b.keys()) - NOT_THE_MODEL
    return [f"{name} = {a.get(name)} instead of {b.get(name)}" for name in sorted(names) if a.get(name) != b.get(name)]


def whole_number(folder: Path, *names: str) -> int | None:
    """The first of ``names`` that ``config.json`` gives a positive whole number; None: it gives none."""
    found = described(folder) or {}
    numbers = (found.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and 0 < number <= LARGEST), None)


def routes_shape(folder: Path) -> tuple[int, int] | None:
    """Layers of a mixture and the experts that each of its tokens takes; None: ``config.json`` describes none."""
    layers, experts = whole_number(folder, "num_hidden_layers"), whole_number(folder, "num_experts_per_tok")
    return None if layers is None or experts is None or whole_number(folder, *EXPERTS) is None else (layers, experts)


def context_length(folder: Path) -> int | None:
    """Tokens that the model reads, prompt and response together; None: ``config.json`` does not say.

    With scaled rotary embeddings a model reads further than ``max_position_embeddings``; how far is the engine's to
    know.
    """
    if (described(folder) or {}).get("rope_scaling"):
        return None
    return whole_number(folder, "max_position_embeddings")
