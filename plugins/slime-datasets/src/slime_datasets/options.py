"""The settings ``--prompt-mix``, ``--streaming-data``, ``--buffer-...`` and others, in TOML ``[datasets]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slime_core import Conflicts, Flag, NamesPrompts, Needs, PluginOptions, UsedBy

__all__ = ["DatasetsOptions"]

SECTION = "data"
"""The section of files in which the settings stood when they were the core's."""

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DatasetsOptions(PluginOptions):
    """Where prompts come from, besides one file that is held in memory, and what of a conversation is trained."""

    prompt_mix: Annotated[
        tuple[tuple[Path, Weight], ...],
        Flag("--prompt-mix", section=SECTION),
        NamesPrompts(),
        UsedBy("streams", "buffered"),
        Conflicts("prompt_data"),
    ] = ()
    """Several of what prompt_data takes, each with its weight: a.jsonl 0.7 b.parquet 0.3. Empty: prompt_data alone."""
    streaming_data: Annotated[bool, Flag("--streaming-data", section=SECTION), UsedBy("streams", "buffered")] = False
    """Read prompts as they are needed: large files start at once and take no memory. False: hold them in memory."""
    shuffle_window: Annotated[
        Count | None,
        Flag("--shuffle-window", section=SECTION),
        Needs("streaming_data"),
        Conflicts("rollout_shuffle"),
    ] = None
    """With streaming_data, shuffle only among so many rows that stand together. None: among all, by an index of the
    files that is made once and kept."""
    loss_mask_type: Annotated[
        Literal["prefix", "qwen3", "distill_qwen"],
        Flag("--loss-mask-type", section=SECTION),
        UsedBy("from_messages"),
    ] = "prefix"
    """How from_messages finds the assistant's turns: templates whose beginnings stay as they are, as slime's qwen;
    templates that leave thoughts out of earlier turns, also slime's qwen3_5; that leave them out of all turns."""
    buffer_filter: Annotated[
        Literal["oldest", "newest", "prioritised", "stratified"],
        Flag("--buffer-filter", section=SECTION),
        UsedBy("buffered"),
    ] = "oldest"
    """Which groups of the buffer come next; prioritised: those with the highest mean reward; stratified: one of each
    value of buffer_key in turn."""
    buffer_key: Annotated[Name | None, Flag("--buffer-key", section=SECTION), UsedBy("buffered")] = None
    """Field of the metadata that buffer_filter = stratified tells groups apart by. None: it is not stratified."""
    buffer_data: Annotated[Path | None, Flag("--buffer-data", section=SECTION), UsedBy("buffered")] = None
    """JSON Lines file of trajectories, or a folder in which such files appear, for the buffer. None: none are read."""
