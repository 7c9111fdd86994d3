"""Section [data]: where prompts come from."""

from __future__ import annotations

from pathlib import Path

from slime_core.config.bounded import Count, Name
from slime_core.config.section import Section

__all__ = ["DataConfig"]


class DataConfig(Section):
    """Where prompts come from."""

    prompt_data: Path | None = None
    """JSON Lines file of prompts. None: the embedded arithmetic problems."""
    input_key: Name = "prompt"
    """Field of a row with the prompt: text, or chat messages."""
    label_key: Name | None = "label"
    """Field of a row with the ground truth for the reward. None: rows have none."""
    metadata_key: Name = "metadata"
    """Field of a row with an object that becomes the sample's metadata; rows may lack it."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a text prompt becomes one user message."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew each epoch, by the seed. False: file order."""
    rollout_max_prompt_len: Count | None = None
    """Leave out prompts longer than this many tokens. None: keep all."""
    data_source: Name = "prompts"
    """Component that hands out prompts; of kind data_source."""
