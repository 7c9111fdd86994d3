"""Looks through a prompt file before anything expensive starts: rows that cannot be read, prompts that are too long.

The lengths are those of the checkpoint's ``tokenizer.json`` and chat template, read without torch (1 s). Left out, and
left to the sampler and the engines: what lies behind the first 32 MB of a file, tokenizers of other kinds or with code
of their own, and prompts after the longest 1 MB of those that may be too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.data.named import GENERATE_FUNCTION, Offered, refuse_unknown
from slime_core.data.row_sampling import Drawn, refuse_unusable
from slime_core.data.rows import PromptRow, read_numbered
from slime_core.errors import DataError
from slime_core.plugins.boundary import boundary

__all__ = ["Reading", "Room", "screen"]

MOST_BYTES = 32 * 2**20
"""Half a second of parsing."""

MOST_TEXT = 2**20
"""Characters turned into tokens, longest prompts first; about a second."""

TEMPLATE_TOKENS = 1024
"""A template is taken to add fewer to a message; such prompts are short enough without being counted."""

Prompt = str | list[dict[str, Any]]
Rows = Sequence[tuple[int, PromptRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the rows of a prompt file are read; see the settings of the same names."""

    input_key: str
    label_key: str | None
    metadata_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many tokens a prompt may have.

    Example: ``Room(context=128, response=8, folder=Path("model"), apply_chat_template=False)`` has room for 120.

    Arguments:
        context: tokens that the model reads, prompt and response together; None: nobody knows before it runs.
        response: the longest response.
        folder: Hugging Face folder with the tokenizer.
        apply_chat_template: prompts are rendered with the tokenizer's template.
        leaves_out: prompts of more tokens are left out of the run; None: none are.
    """

    context: int | None
    response: int
    folder: Path
    apply_chat_template: bool
    leaves_out: int | None = None

    @property
    def prompt(self) -> float:
        """Tokens of the longest prompt that fits."""
        return float("inf") if self.context is None else self.context - self.response


def screen(
    path: Path,
    reading: Reading,
    *,
    room: Room | None,
    setting: str,
    offered: Offered | None = None,
    drawn: Drawn | None = None,
) -> None:
    """Returns if nothing wrong was found in the prompts of ``path``.

    Arguments:
        reading: how rows are read.
        room: how long prompts may be; None: that is not known. It is of the run's generate function: rows that name
            their own have no limit here.
        setting: which setting named the file.
        offered: what rows may name for themselves; None: what they name is not looked at.
        drawn: of a run that trains on them, what rows may not change; None: they are only measured.

    Raises:
        DataError: the file is missing, empty or malformed, a prompt is too long, or a row names what no active plugin
            offers; names the line.
    """
    rows = read_numbered(
        path,
        input_key=reading.input_key,
        label_key=reading.label_key,
        metadata_key=reading.metadata_key,
        most_bytes=MOST_BYTES,
    )
    for number, row in rows:
        refuse_unknown(row.metadata, offered or {}, where=f"{path}, line {number}")
        refuse_unusable(row.metadata, drawn=drawn, where=f"{path}, line {number}")
    rows = [(number, row) for number, row in rows if not row.metadata.get(GENERATE_FUNCTION)]
    if room is not None:
        if not room.apply_chat_template:
            _refuse_messages(path, rows)
        _refuse_long(path, rows, room, setting)


def _refuse_messages(path: Path, rows: Rows) -> None:
    number = next((number for number, row in rows if not isinstance(row.prompt, str)), None)
    if number is not None:
        raise DataError(
            f"{path}, line {number}: the prompt is a list of chat messages, and only a chat template turns those into "
            "text; add --apply-chat-template"
        )


def _refuse_long(path: Path, rows: Rows, room: Room, setting: str) -> None:
    suspects = list(_suspects(rows, room.prompt))
    lengths = _lengths(path, suspects, room)
    kept = {number: length for number, length in lengths.items() if length <= (room.leaves_out or length)}
    long = sorted(number for number, length in kept.items() if length > room.prompt)
    if long:
        more = f" and {len(long) - 1} more" if len(long) > 1 else ""
        length = kept[long[0]]
        leave_out = f"leave them out with --rollout-max-prompt-len {room.prompt}, " if setting == "prompt_data" else ""
        raise DataError(
            f"{path}, line {long[0]}{more}: a prompt of {length} tokens in {setting}, and a response may have "
            f"{room.response}, together {length + room.response}; the model reads at most {room.context}. Accepted are "
            f"prompts of at most {room.prompt} tokens: shorten them, {leave_out}or ask for shorter responses."
        )


def _suspects(rows: Rows, most_tokens: float) -> Iterator[tuple[int, Prompt]]:
    """Prompts that may be too long, longest first: a token is at least a byte of text, or comes from the template."""
    sized = [(_size(row.prompt), number, row.prompt) for number, row in rows]
    left = MOST_TEXT
    for size, number, prompt in sorted(sized, key=lambda one: one[:2], reverse=True):
        left -= size
        if size + TEMPLATE_TOKENS <= most_tokens or left < 0:
            return
        yield number, prompt


def _size(prompt: Prompt) -> int:
    return len((prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)).encode())


def _lengths(path: Path, prompts: Sequence[tuple[int, Prompt]], room: Room) -> dict[int, int]:
    """Line number -> tokens; empty where it takes more than ``tokenizer.json`` to tell."""
    tokenizer = _tokenizer(room.folder) if prompts else None
    if tokenizer is None:
        return {}
    if room.apply_chat_template and not tokenizer.chat_template:
        raise DataError(f"--apply-chat-template was asked for, but the tokenizer in {room.folder} has no chat template")
    lengths = {}
    for number, prompt in prompts:
        with boundary(f"{path}, line {number}", "turning the prompt into tokens", error=DataError):
            lengths[number] = _length(tokenizer, prompt, apply_chat_template=room.apply_chat_template)
    return lengths


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file() or _has_code(folder):
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every prompt that is too long
    next_step = "Take tokenizer.json and tokenizer_config.json from where the checkpoint came from."
    with boundary(f"the tokenizer in {folder}", "reading it", error=DataError, next_step=next_step):
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _has_code(folder: Path) -> bool:
    try:
        return "auto_map" in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _length(tokenizer: Any, prompt: Prompt, *, apply_chat_template: bool) -> int:
    if not apply_chat_template:
        return len(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
