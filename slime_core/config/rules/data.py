"""The rules of where prompts come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["DATA"]


GIVEN_BY_THE_RUN = frozenset(
    {
        *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""Arguments of ``apply_chat_template`` in transformers that are no variables of a template."""


def _template_arguments_are_used(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not isinstance(_parsed(data.apply_chat_template_kwargs), dict):
        yield (
            f"apply_chat_template_kwargs = {data.apply_chat_template_kwargs!r} is no JSON object; accepted: text such "
            """as '{"enable_thinking": false}'"""
        )
    elif taken := sorted(GIVEN_BY_THE_RUN & _parsed(data.apply_chat_template_kwargs).keys()):
        yield (
            f"apply_chat_template_kwargs = {data.apply_chat_template_kwargs!r} holds {', '.join(taken)}, which the run "
            "itself decides at each prompt; accepted: what the template reads besides, such as enable_thinking"
        )


def _inputs_are_named(config: RunConfig) -> Iterator[str]:
    text = config.data.multimodal_keys
    found = None if text is None else _parsed(text)
    if text is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found.values())):
        yield (
            f"multimodal_keys = {text!r} does not name fields; accepted: a JSON object of kinds and the fields that "
            """hold them, such as '{"image": "images"}'"""
        )


def _parsed(text: str) -> Any:
    """The value of JSON; text that is none stands for itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


DATA: dict[Rule, str] = {
    _template_arguments_are_used: "apply_chat_template_kwargs apply_chat_template",
    _inputs_are_named: "multimodal_keys",
}
"""Rule -> the settings it reads."""
