"""Samples as functions written for THUDM's slime see them.

There, the data set renders each prompt with the chat template, so that ``sample.prompt`` is text; and ``sample.label``
is the row's value. Here, ``Sample.prompt`` has the messages and ``Sample.label`` is text. The adapters call functions
inside :func:`as_in_slime`, which changes both for the time of the call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from slime_core.generation import Encoder
from slime_core.prompts.chat import PromptTokenizer
from slime_core.types import JsonLabel, Prompt, Sample, tools_of

__all__ = ["as_in_slime", "flattened", "originals", "render", "restore"]


def render(samples: Sequence[Sample], encoder: Encoder | None) -> None:
    """Set ``prompt_text`` of samples that have none, if ``encoder`` renders prompts with a chat template.

    Raises:
        DataError: the chat template refuses a prompt.
    """
    if encoder is None or not encoder.uses_template:
        return
    for sample in samples:
        if sample.prompt_text is None:
            tokenizer = cast(PromptTokenizer, encoder)
            sample.prompt_text = tokenizer.text(sample.prompt, tools=tools_of(sample.metadata))


@contextmanager
def as_in_slime(samples: Sequence[Sample], encoder: Encoder | None = None) -> Iterator[None]:
    """Give ``samples`` rendered prompts, and labels as the rows have them, until the context ends.

    A prompt or a label that the function sets stays; a prompt that is text then counts as rendered.

    Arguments:
        encoder: renders prompts that have not been rendered; None leaves them unchanged.

    Raises:
        DataError: the chat template refuses a prompt.
    """
    render(samples, encoder)
    before = [(sample, sample.prompt, sample.label, sample.prompt_text) for sample in samples]
    for sample in samples:
        sample.prompt = sample.prompt if sample.prompt_text is None else sample.prompt_text
        if isinstance(sample.label, JsonLabel):
            sample.label = json.loads(sample.label)
    shown = [(sample.prompt, sample.label) for sample in samples]
    try:
        yield
    finally:
        for (sample, prompt, label, text), (shown_prompt, shown_label) in zip(before, shown, strict=True):
            sample.label = label if sample.label is shown_label else _as_text(sample.label)
            if sample.prompt == shown_prompt:
                sample.prompt = prompt
            elif text is not None:
                sample.prompt_text = sample.prompt if isinstance(sample.prompt, str) else None


def _as_text(label: Any) -> str | None:
    return JsonLabel(json.dumps(label)) if isinstance(label, dict | list) else cast("str | None", label)


def flattened(returned: Any) -> list[Any]:
    """Return the entries of a sample, or of a list in which a generation that fanned out may be a nested list."""
    entries = returned if isinstance(returned, list | tuple) else [returned]
    return [inner for entry in entries for inner in (entry if isinstance(entry, list | tuple) else [entry])]


def originals(samples: Sequence[Sample]) -> dict[str, Prompt]:
    """Return rendered prompt -> the prompt that was rendered."""
    return {sample.prompt_text: sample.prompt for sample in samples if sample.prompt_text is not None}


def restore(returned: Sequence[Sample], passed: Sequence[Sample], prompts: Mapping[str, Prompt]) -> None:
    """Give new samples that a function returned their prompts and labels back; :func:`as_in_slime` does so for
    ``passed``, the samples that the function got.

    Arguments:
        prompts: :func:`originals` of ``passed``, from before the call.
    """
    unchanged = set(map(id, passed))
    for sample in returned:
        if id(sample) in unchanged:
            continue
        sample.label = _as_text(sample.label)
        if isinstance(sample.prompt, str) and sample.prompt in prompts:
            sample.prompt_text, sample.prompt = sample.prompt, prompts[sample.prompt]
        elif prompts and isinstance(sample.prompt, str):
            sample.prompt_text = sample.prompt
