"""Checks prompt files before anything expensive starts: rows that cannot be read, prompts that are too long or that the
chat template does not render whole.

Lengths are counted with the checkpoint's ``tokenizer.json`` and chat template, without torch. The sampler and the
engines check the rest: rows after the first 32 MB of a file, tokenizers of other kinds or with Python code, and of the
prompts that may be too long those after the longest 1 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.errors import DataError
from slime_core.prompts.chat import PromptTokenizer, tokenizer_without_model
from slime_core.prompts.messages import form_of
from slime_core.provisional import PromptLimits, PromptRequest, PromptRow, PromptScreen
from slime_core.types import GENERATE_FUNCTION, SAMPLING_PARAMS
from slime_datasets.rows import content_of, has_field, names_in, prompts_of
from slime_datasets.tables import Row

__all__ = ["screen_paths"]

MOST_BYTES = 32 * 2**20
"""Bytes of a file that are checked; half a second of parsing."""

MOST_TEXT = 2**20
"""Characters turned into tokens, longest prompts first; about a second."""

MOST_RENDERED = 512
"""Prompts that are rendered: one of each form, the first, and others at equal distances."""

TEMPLATE_TOKENS = 1024
"""Most tokens that a template is assumed to add to a prompt; it decides which prompts need no count."""


def screen_paths(
    paths: Sequence[Path], request: PromptRequest, screen: PromptScreen, *, share: float = 1.0
) -> list[str]:
    """Check the prompts of all ``paths``; return the mistakes in rows that the run leaves out (``request.skips_bad``).

    Arguments:
        share: fraction of the usual bytes that are checked.

    Raises:
        DataError: a file is missing, empty or malformed, a prompt is too long, or a row requests what the run does not
            support; names file and line. Or no row of any file has a field of ``screen.keys``.
    """
    bad: list[str] = []
    missing = dict(screen.keys)
    names = ""
    for path in paths:
        pairs = _screen_path(replace(request, path=path), screen, bad, most_bytes=int(share * MOST_BYTES))
        missing = {setting: key for setting, key in missing.items() if not any(has_field(raw, key) for raw, _ in pairs)}
        names = names or names_in(content_of(pairs[0][0]))
        screen.see(path, [row for _, row in pairs])
    for setting, key in missing.items():
        raise DataError(
            f"{', '.join(map(str, paths))}: none of the rows that were checked has a field {key!r} ({setting}); the "
            f"first one has {names}. Name the right one with --{setting.replace('_', '-')}"
        )
    return bad


def _screen_path(
    request: PromptRequest, screen: PromptScreen, bad: list[str], *, most_bytes: int
) -> list[tuple[Row, PromptRow]]:
    """Check the prompts of one path; add the mistakes of rows that are left out to ``bad``; return the other rows."""
    mistakes: list[str] = []
    pairs = list(prompts_of(request, most_bytes=most_bytes, bad=mistakes if request.skips_bad else None))
    if not pairs:
        raise DataError(f"{request.path}: none of the rows that were checked can be read, the first one: {mistakes[0]}")
    rows = [row for _, row in pairs if not row.metadata.get(GENERATE_FUNCTION)]
    if screen.limits is not None and rows:
        mistakes += _check_rows(rows, screen.limits, request, screen.setting)
    bad += mistakes
    return pairs


def _check_rows(rows: list[PromptRow], limits: PromptLimits, request: PromptRequest, setting: str) -> list[str]:
    """Return the mistakes of prompts that are left out because the template does not render them whole.

    Raises:
        DataError: a prompt is too long, or cannot be rendered.
    """
    chat = next((row.place for row in rows if not isinstance(row.prompt, str)), None)
    if chat is not None and not limits.apply_chat_template:
        raise DataError(f"{chat}: the prompt is a list of chat messages; add --apply-chat-template to render them")
    if not limits.apply_chat_template and not any(_may_be_long(row, limits) for row in rows):
        return []
    tokenizer = tokenizer_without_model(
        limits.folder, apply_chat_template=limits.apply_chat_template, template_arguments=limits.template_arguments
    )
    if tokenizer is None:
        return []
    refused = _refused(rows, tokenizer)
    if refused and not request.skips_bad:
        raise DataError(next(iter(refused.values())))
    _refuse_long([row for row in rows if row.place not in refused], tokenizer, limits, setting)
    return list(refused.values())


def _refused(rows: Sequence[PromptRow], tokenizer: PromptTokenizer) -> Mapping[str, str]:
    """Return place -> mistake, of a sample of the prompts, that the chat template refuses or does not render whole."""
    refused: dict[str, str] = {}
    for row in _sample(rows):
        try:
            tokenizer.check(row.prompt, tools=row.tools)
        except DataError as problem:
            refused[row.place] = f"{row.place}: {problem}"
    return refused


def _sample(rows: Sequence[PromptRow]) -> Iterator[PromptRow]:
    """Yield the prompts that are rendered, up to 1 MB of text, in the order of the file."""
    forms: dict[object, int] = {}
    for position, row in enumerate(rows):
        forms.setdefault(form_of(row.prompt, has_tools=bool(row.tools)), position)
    step = max(1, 2 * len(rows) // MOST_RENDERED)
    candidates = [*forms.values(), *range(min(len(rows), MOST_RENDERED // 2)), *range(0, len(rows), step)]
    positions: list[int] = []
    size = 0
    for position in dict.fromkeys(candidates):
        if len(positions) == MOST_RENDERED or size > MOST_TEXT:
            break
        positions.append(position)
        size += _size(rows[position])
    return (rows[position] for position in sorted(positions))


def _refuse_long(rows: Sequence[PromptRow], tokenizer: PromptTokenizer, limits: PromptLimits, setting: str) -> None:
    """Raise DataError if a prompt leaves no room for its response; counts the tokens of the longest prompts."""
    size = 0
    for row in sorted(rows, key=_size, reverse=True):
        if limits.context is None or size > MOST_TEXT or not _may_be_long(row, limits):
            continue
        size += _size(row)
        length, response = _length(row, tokenizer), _longest_response(row, limits)
        if length + response > limits.context and length <= (limits.leaves_out or length):
            raise DataError(
                f"{row.place}: a prompt of {length} tokens in {setting}, and a response may have {response}, but the "
                f"model reads at most {limits.context} together. Shorten the prompt, leave such prompts out "
                f"(--rollout-max-prompt-len {limits.context - response}), or request shorter responses"
            )


def _may_be_long(row: PromptRow, limits: PromptLimits) -> bool:
    """Return whether a prompt may be too long: a token is at least a byte of text, or comes from the template."""
    return limits.context is not None and _size(row) + TEMPLATE_TOKENS + _longest_response(row, limits) > limits.context


def _length(row: PromptRow, tokenizer: PromptTokenizer) -> int:
    try:
        return len(tokenizer.encode(row.prompt, tools=row.tools))
    except DataError as problem:
        raise DataError(f"{row.place}: {problem}") from problem


def _longest_response(row: PromptRow, limits: PromptLimits) -> int:
    """Return the longest response in tokens; a row may set another limit."""
    sampling = row.metadata.get(SAMPLING_PARAMS)
    longest = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    return longest if isinstance(longest, int) else limits.response


def _size(row: PromptRow) -> int:
    """Return the size of the prompt in bytes, with its tools."""
    if isinstance(row.prompt, str) and not row.tools:
        return len(row.prompt.encode())
    return len(json.dumps([row.prompt, row.tools], ensure_ascii=False, default=str).encode())
