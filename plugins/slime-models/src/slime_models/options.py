"""The setting ``--model``."""

from __future__ import annotations

from typing import Annotated

from slime_core import Flag, PluginOptions

__all__ = ["ModelOptions"]


class ModelOptions(PluginOptions):
    """The expected model of the checkpoint."""

    model: Annotated[str | None, Flag("--model", value="NAME")] = None
    """Preset that the checkpoint must be, such as qwen3-4B (slime models list); if a field of config.json differs, the
    run does not start. None: any checkpoint of a supported family."""
