"""The setting ``--model``."""

from __future__ import annotations

from typing import Annotated

from slime_core import Flag, PluginOptions

__all__ = ["ModelOptions"]


class ModelOptions(PluginOptions):
    """What the checkpoint is meant to be."""

    model: Annotated[str | None, Flag("--model", value="NAME")] = None
    """Preset that the checkpoint must be, such as qwen3-4B (slime models list); a field of config.json that differs
    ends the run before it starts. None: any checkpoint of a family that is built."""
