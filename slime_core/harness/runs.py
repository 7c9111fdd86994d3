"""A run for components under test."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from slime_core import RunView
from slime_core.config.embedded import ARITHMETIC
from slime_core.config.schema import RunConfig
from slime_core.plugins.construction import run_view

__all__ = ["default_run_view"]


def default_run_view(options: Mapping[str, BaseModel] | None = None) -> RunView:
    """What a component is made with in a run of the built-in model with every setting at its default.

    Arguments:
        options: plugin name -> its options object, for ``settings``.
    """
    return run_view(RunConfig(), options, model_folder=ARITHMETIC / "model")
