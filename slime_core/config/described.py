"""What a Hugging Face folder's ``config.json`` says about its model, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime_core.config.embedded import ARITHMETIC
from slime_core.config.schema import RunConfig

__all__ = ["context_length", "described", "start_weights", "whole_number"]


def described(folder: Path) -> dict[str, Any] | None:
    """The object in ``config.json``; None: there is none that can be read."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def start_weights(config: RunConfig) -> Path:
    """The folder of the start weights, the user's or the embedded one."""
    return config.model.hf_checkpoint or ARITHMETIC / "model"


def whole_number(folder: Path, *names: str) -> int | None:
    """The first of ``names`` that ``config.json`` gives a positive whole number; None: it gives none."""
    found = described(folder) or {}
    numbers = (found.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)


def context_length(folder: Path) -> int | None:
    """Tokens that the model reads, prompt and response together; None: ``config.json`` does not say.

    With scaled rotary embeddings a model reads further than ``max_position_embeddings``; how far is the engine's to
    know.
    """
    if (described(folder) or {}).get("rope_scaling"):
        return None
    return whole_number(folder, "max_position_embeddings")
