"""The settings ``--prompt-mix``, ``--streaming-data``, ``--buffer-...`` and others, in TOML ``[datasets]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slime_core import Conflicts, Flag, Needs, PluginOptions, UsedBy
from slime_core.provisional import NamesPrompts

__all__ = ["DatasetsOptions"]

SECTION = "data"
"""The TOML section that older files use for these settings."""

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


FAMILIES = ("prefix", "qwen", "qwen3", "qwen3_5", "distill_qwen")
"""Values of ``loss_mask_type`` in slime's launch scripts and in older files of this project; none is needed."""


def _without_family(value: object) -> object:
    return "auto" if value in FAMILIES else value


class DatasetsOptions(PluginOptions):
    """Prompt sources other than one file in memory, and the trained tokens of conversations."""

    prompt_mix: Annotated[
        tuple[tuple[Path, Weight], ...],
        Flag("--prompt-mix", section=SECTION),
        NamesPrompts(),
        UsedBy("prompts", "buffered"),
        Conflicts("prompt_data"),
    ] = ()
    """A weighted mix of prompt files instead of prompt_data: a.jsonl 0.7 b.parquet 0.3. Empty: prompt_data alone."""
    streaming_data: Annotated[bool, Flag("--streaming-data", section=SECTION), UsedBy("prompts", "buffered")] = False
    """Read prompts as they are needed: large files start at once and need no memory. False: load them into memory."""
    shuffle_window: Annotated[
        Count | None,
        Flag("--shuffle-window", section=SECTION),
        Needs("streaming_data"),
        Conflicts("rollout_shuffle"),
    ] = None
    """With streaming_data, shuffle only within blocks of this many rows. None: shuffle all rows, with an index of the
    files that is built once and cached."""
    num_epoch: Annotated[
        Count | None, Flag("--num-epoch", section=SECTION), Needs("prompt_data"), UsedBy("prompts", "buffered")
    ] = None
    """Passes over the rows of prompt_data, from which num_rollout follows unless it is set. Rows that are left out, or
    sampled again in place of dropped groups, are not considered. None: num_rollout counts."""
    loss_mask_type: Annotated[
        Literal["auto"],
        BeforeValidator(_without_family),
        Flag("--loss-mask-type", section=SECTION),
        UsedBy("from_messages"),
    ] = "auto"
    """Way of from_messages to find the assistant's turns: as the chat template writes them. slime's names of families
    of templates (qwen, qwen3, qwen3_5, distill_qwen) mean the same."""
    buffer_filter: Annotated[
        Literal["oldest", "newest", "prioritised", "stratified"],
        Flag("--buffer-filter", section=SECTION),
        UsedBy("buffered"),
    ] = "oldest"
    """Order in which the data source buffered returns groups. prioritised: highest mean reward first. stratified: one
    group of each value of buffer_key in turn."""
    buffer_key: Annotated[Name | None, Flag("--buffer-key", section=SECTION), UsedBy("buffered")] = None
    """Metadata field whose values are the strata of buffer_filter = stratified. None: not stratified."""
    buffer_data: Annotated[Path | None, Flag("--buffer-data", section=SECTION), UsedBy("buffered")] = None
    """JSON Lines file of trajectories for the data source buffered, or a folder in which such files appear. None:
    no file."""
