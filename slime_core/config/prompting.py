"""Section [data]: where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from slime_core.config.options import Needs
from slime_core.config.section import Count, CountOrZero, Name, Section

__all__ = ["DataConfig"]


class DataConfig(Section):
    """Where prompts come from."""

    prompt_data: Path | None = None
    """Prompts: a JSON Lines or Parquet file, a folder of such, a folder that datasets saved, a pattern such as
    'data/*.jsonl'; @[a:b] behind it takes rows a to b-1. None: the embedded arithmetic problems."""
    input_key: Name = "prompt"
    """Field of a row with the prompt: text, or chat messages."""
    label_key: Name | None = "label"
    """Field of a row with the ground truth for the reward. None: rows have none."""
    metadata_key: Name = "metadata"
    """Field of a row with an object that becomes the sample's metadata; rows may lack it."""
    tool_key: Name | None = "tools"
    """Field of a row with a list of tools that the chat template shows the model; rows may lack it. None: no tools."""
    multimodal_keys: Name | None = None
    """Fields of a row with images and the like, as JSON: '{"image": "images"}'; the engine is sent them. None: none."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a text prompt becomes one user message."""
    apply_chat_template_kwargs: Annotated[Name, Needs("apply_chat_template")] = "{}"
    """Further arguments of the chat template, as JSON: '{"enable_thinking": false}'."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew each epoch, by the seed. False: file order."""
    rollout_max_prompt_len: Count | None = None
    """Leave out prompts longer than this many tokens, and count them. None: keep all."""
    num_data_workers: Annotated[CountOrZero, Needs("rollout_max_prompt_len")] = 0
    """Processes that count the tokens of prompts for rollout_max_prompt_len. 0: the sampler itself does."""
    on_bad_data: Literal["fail", "skip"] = "fail"
    """What to do with a row that cannot be read, or names what the run has not: end the run and name it, or leave it
    out, count it and name it in logs/bad-rows.log."""
    data_source: Name = "prompts"
    """Component that hands out prompts; of kind data_source."""
