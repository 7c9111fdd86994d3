"""Section [engine]: the SGLang servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_core.config.bounded import Count, Positive
from slime_core.config.section import Section

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """The SGLang servers."""

    sglang_mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of an engine's memory for weights and KV cache. None: SGLang decides."""
    sglang_context_length: Count | None = None
    """Longest prompt plus response in tokens. None: what the model's config.json says."""
    engine_start_timeout_s: Positive = 300.0
    """Seconds until a starting engine must answer."""
