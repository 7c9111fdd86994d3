"""The settings ``--lora-...``, in TOML ``[lora]``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field

from slime_core import Flag, PluginOptions

__all__ = ["ALL_LINEAR", "LoraOptions"]

ALL_LINEAR = "all-linear"


class LoraOptions(PluginOptions):
    """Rank, scale and place of the adapters."""

    rank: Annotated[int, Field(ge=1), Flag("--lora-rank")] = 16
    """Rank of every adapter."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), Flag("--lora-alpha")] = 32.0
    """Adapters are multiplied by alpha / rank."""
    rs: Annotated[bool, Flag("--lora-rs")] = False
    """Multiply adapters by alpha / sqrt(rank) instead (rsLoRA)."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1), Flag("--lora-target-modules")] = (ALL_LINEAR,)
    """Linear layers with an adapter, by the end of their Hugging Face names, such as q_proj v_proj. all-linear: every
    linear layer of the decoder, except routers."""
    load: Annotated[Path | None, Flag("--lora-load")] = None
    """Folder with an adapter in peft's format to start from. Its rank, scale and modules must be those of the run."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices of an adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)
