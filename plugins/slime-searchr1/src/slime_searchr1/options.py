"""The settings of the plugin, in TOML ``[searchr1]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from slime_core import Conflicts, Flag, PluginOptions, UsedBy

__all__ = ["SearchOptions"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
OfTurns = UsedBy("search_r1", kind="generate_function")
OfRewards = UsedBy("search_r1", kind="reward_model")


class SearchOptions(PluginOptions):
    """The retriever, its limits and the reward."""

    search_url: Annotated[Annotated[str, Field(min_length=1)] | None, Flag("--search-url", value="URL"), OfTurns] = None
    """URL of a retriever: http://HOST:8000/retrieve; ${NAME} is that environment variable. None: the built-in one."""
    corpus: Annotated[Path | None, OfTurns, Conflicts("search_url")] = None
    """Passages of the built-in retriever: JSON Lines with "contents". None: those of the invented world."""
    topk: Annotated[Annotated[int, Field(ge=1, le=100)], OfTurns] = 3
    """Number of passages that a search returns."""
    search_timeout_s: Annotated[Seconds, OfTurns] = 60.0
    """Time limit of a search, in seconds, including retries; beyond it, the model reads that the search failed."""
    search_concurrency: Annotated[Count, OfTurns] = 256
    """Limit on concurrent requests to the retriever; other searches wait."""
    information_max_chars: Annotated[Count, OfTurns] = 4000
    """Limit on the passages of one search, in characters; the rest is left out."""
    format_score: Annotated[Annotated[float, Field(ge=0, le=1)], OfRewards] = 0.2
    """Fraction of the reward for a well-formed response; the rest is for the right answer. 0: the answer alone."""
