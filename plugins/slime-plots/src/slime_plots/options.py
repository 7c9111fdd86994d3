"""The settings of plugin ``profiler``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core import PluginOptions

__all__ = ["ProfilerOptions"]


class ProfilerOptions(PluginOptions):
    """Profiled rollouts and ranks. A profiled step is slower; its file has about 1 MB for each 10,000 operations."""

    rollouts: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    """Rollouts whose optimizer steps are profiled. Rollout 0 also measures what runs once, such as compiling."""
    ranks: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Learner ranks that are profiled."""
    shapes: bool = False
    """Record the shapes of the tensors of every operation."""
    memory: bool = False
    """Record allocations. On a GPU also a snapshot of its memory with the stack of each allocation."""
