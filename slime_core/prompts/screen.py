"""Checks a prompt file before anything expensive starts: rows that cannot be read, prompts that are too long, and
characters that the tokenizer does not know, and prompts that the chat template does not render whole. The commands
that start or check a run call it.

Lengths are counted with the checkpoint's ``tokenizer.json`` and chat template, without torch (1 s). Not checked here,
but by the sampler and the engines: rows after the first 32 MB of a file, tokenizers of other kinds or with Python code,
of the prompts that may be too long, those after the longest 1 MB, and rendered prompts other than a sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from slime_core.config.schema import ARITHMETIC
from slime_core.contracts import PromptRequest, RawRow
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptTokenizer
from slime_core.prompts.messages import form_of
from slime_core.prompts.row_checks import own_sampling
from slime_core.prompts.rows import NOTHING, PromptRow, content_of, field_at, numbered_prompts, size_of
from slime_core.types import GENERATE_FUNCTION, JsonValue
from slime_core.untrusted import read_object
from slime_core.user_code.failures import boundary

__all__ = ["Room", "has_field", "screen", "writes_tools"]

MOST_BYTES = 32 * 2**20
"""Bytes of a file that are checked; half a second of parsing."""

MOST_TEXT = 2**20
"""Characters turned into tokens, longest prompts first; about a second."""

MOST_ENCODED = 256
"""Prompts in which unknown tokens are counted."""

MOST_RENDERED = 512
"""Prompts that are rendered: one of each form, the first, and others at equal distances."""

MANY_UNKNOWN = 0.01
"""Share of unknown tokens from which on there is a warning."""

TEMPLATE_TOKENS = 1024
"""Most tokens that a template is assumed to add to a prompt; it decides which prompts need no count."""

Rows = Sequence[tuple[str, PromptRow]]
"""File and line of each row, and the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The limit of a prompt in tokens.

    Example: ``Room(context=128, response=8, folder=Path("model"), apply_chat_template=False)`` has room for 120.

    Arguments:
        context: tokens that the model reads, prompt and response together; None: unknown before it runs.
        response: the longest response.
        folder: Hugging Face folder with the tokenizer.
        apply_chat_template: prompts are rendered with the tokenizer's template.
        template_arguments: what the template is given in addition.
        leaves_out: prompts of more tokens are left out of the run; None: none are.
    """

    context: int | None
    response: int
    folder: Path
    apply_chat_template: bool
    leaves_out: int | None = None
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def prompt(self) -> float:
        """Tokens of the longest prompt that fits."""
        return float("inf") if self.context is None else self.context - self.response


def screen(
    request: PromptRequest,
    *,
    room: Room | None,
    setting: str,
    share: float = 1.0,
    warn: Callable[[str], None] | None = None,
    see: Callable[[Sequence[tuple[RawRow, PromptRow]]], None] | None = None,
) -> list[str]:
    """Returns if nothing wrong was found in the prompts of ``request``.

    Arguments:
        room: how long prompts may be; None: that is not known. It is of the run's generate function: rows that name
            their own have no limit here.
        setting: which setting named the file.
        share: of the bytes that are looked at otherwise.
        warn: called with what a run can do with and a person should know.
        see: called with the rows that can be read, if nothing is wrong with them.

    Returns:
        What is wrong with rows that the run leaves out (``request.skips_bad``), each with file and line.

    Raises:
        DataError: the file is missing, empty or malformed, a prompt is too long, or a row names what no active plugin
            offers; names the line.
    """
    most = int(share * MOST_BYTES)
    bad: list[str] = []
    found = list(numbered_prompts(request, most_bytes=most, bad=bad if request.skips_bad else None))
    if not found:
        none = f"none of the {len(bad)} rows that were looked at can be read, the first one: {bad[0]}"
        raise DataError(f"{request.path}: {none}")
    rows = [(raw.place, row) for raw, row in found if not row.metadata.get(GENERATE_FUNCTION)]
    if room is not None:
        if not room.apply_chat_template:
            _refuse_messages(rows)
        elif refused := _refused(rows, room):
            if not request.skips_bad:
                raise DataError(next(iter(refused.values())))
            bad += refused.values()
            rows = [row for position, row in enumerate(rows) if position not in refused]
        for own, those in _by_response(rows, room).items():
            _refuse_long(those, replace(room, response=own), setting)
        if not bad and sum(size_of(raw) for raw, _ in found) < most:
            _refuse_if_all_are_long(rows, room, request.path)
        if warn is not None and (share_unknown := _share_unknown(rows[:MOST_ENCODED], room)) >= MANY_UNKNOWN:
            warn(
                f"{request.path}: {share_unknown:.0%} of the prompt tokens stand for text that the tokenizer in "
                f"{room.folder} does not know. The model cannot read it: write prompts in what it knows, or name "
                "another model (--hf-checkpoint)"
            )
    if see is not None:
        see(found)
    return bad


def writes_tools(folder: Path | None, template_arguments: Mapping[str, JsonValue]) -> bool:
    """Return whether the chat template of a checkpoint writes tools; True also if only the sampler can read it.

    Arguments:
        folder: of the checkpoint; None: the built-in model.
        template_arguments: further arguments of the template.
    """
    tokenizer = _tokenizer(
        Room(
            context=None,
            response=0,
            folder=folder or ARITHMETIC / "model",
            apply_chat_template=True,
            template_arguments=template_arguments,
        )
    )
    return tokenizer is None or tokenizer.template([{}]).shows_tools


def _refused(rows: Rows, room: Room) -> dict[int, str]:
    """Return position -> mistake of prompts that the chat template refuses or does not render whole; of a sample."""
    tokenizer = _tokenizer(room) if rows else None
    refused: dict[int, str] = {}
    if tokenizer is None:
        return refused
    for position in _sample(rows):
        place, row = rows[position]
        try:
            tokenizer.check(row.prompt, tools=row.tools)
        except DataError as problem:
            refused[position] = f"{place}: {problem}"
    return refused


def _sample(rows: Rows) -> list[int]:
    """Return the positions of the prompts that are rendered, up to 1 MB of text, in the order of the file."""
    forms: dict[object, int] = {}
    for position, (_, row) in enumerate(rows):
        forms.setdefault(form_of(row.prompt, has_tools=bool(row.tools)), position)
    step = max(1, 2 * len(rows) // MOST_RENDERED)
    candidates = [*forms.values(), *range(min(len(rows), MOST_RENDERED // 2)), *range(0, len(rows), step)]
    chosen: list[int] = []
    left = MOST_TEXT
    for position in dict.fromkeys(candidates):
        if len(chosen) == MOST_RENDERED or left < 0:
            break
        chosen.append(position)
        left -= _size(rows[position][1])
    return sorted(chosen)


def has_field(rows: Sequence[tuple[RawRow, PromptRow]], key: str) -> bool:
    """Whether one of ``rows`` has the field ``key``, which may be a path."""
    return any(field_at(content_of(raw), key) not in (None, NOTHING) for raw, _ in rows)


def _refuse_messages(rows: Rows) -> None:
    place = next((place for place, row in rows if not isinstance(row.prompt, str)), None)
    if place is not None:
        raise DataError(
            f"{place}: the prompt is a list of chat messages, and only a chat template turns those into text; add "
            "--apply-chat-template"
        )


def _by_response(rows: Rows, room: Room) -> Mapping[int, Rows]:
    """Longest response -> the rows that may have one of that length; a row may name its own."""
    found: dict[int, list[tuple[str, PromptRow]]] = {}
    for place, row in rows:
        own = cast(int, own_sampling(row.metadata, of_run=None, where=place).get("max_new_tokens", room.response))
        found.setdefault(own, []).append((place, row))
    return found


def _refuse_long(rows: Rows, room: Room, setting: str) -> None:
    suspects = list(_suspects(rows, room.prompt))
    lengths = _lengths([rows[position] for position in suspects], room)
    found = dict(zip(suspects, lengths, strict=False))
    kept = {position: length for position, length in found.items() if length <= (room.leaves_out or length)}
    long = sorted(position for position, length in kept.items() if length > room.prompt)
    if long:
        more = f" and {len(long) - 1} more" if len(long) > 1 else ""
        length = kept[long[0]]
        trains = setting.startswith("prompt_")
        leave_out = f"leave them out with --rollout-max-prompt-len {room.prompt}, " if trains else ""
        raise DataError(
            f"{rows[long[0]][0]}{more}: a prompt of {length} tokens in {setting}, and a response may have "
            f"{room.response}, together {length + room.response}; the model reads at most {room.context}. Accepted are "
            f"prompts of at most {room.prompt} tokens: shorten them, {leave_out}or ask for shorter responses."
        )


def _refuse_if_all_are_long(rows: Rows, room: Room, path: Path) -> None:
    """Raise DataError if no prompt is short enough; the shortest are counted first, and usually one of them is."""
    sized = sorted((_size(row), position) for position, (_, row) in enumerate(rows))
    if room.leaves_out is None or not sized or sum(size for size, _ in sized) > MOST_TEXT:
        return
    for positions in ([position for _, position in sized[:8]], range(len(rows))):
        lengths = _lengths([rows[position] for position in positions], room)
        if min(lengths, default=0) <= room.leaves_out:
            return
    raise DataError(
        f"{path}: all {len(rows)} prompts have more than the {room.leaves_out} tokens that a prompt may have here, the "
        f"shortest {min(lengths)}; raise the limit (--rollout-max-prompt-len; of evaluations, --eval-max-prompt-len or "
        "max_context_len), or shorten them"
    )


def _suspects(rows: Rows, most_tokens: float) -> Iterator[int]:
    """Positions of prompts that may be too long, longest first: a token is at least a byte of text, or comes from the
    template."""
    sized = [(_size(row), position) for position, (_, row) in enumerate(rows)]
    left = MOST_TEXT
    for size, position in sorted(sized, reverse=True):
        left -= size
        if size + TEMPLATE_TOKENS <= most_tokens or left < 0:
            return
        yield position


def _size(row: PromptRow) -> int:
    whole = row.prompt if isinstance(row.prompt, str) and not row.tools else [row.prompt, row.tools]
    return len((whole if isinstance(whole, str) else json.dumps(whole, ensure_ascii=False, default=str)).encode())


def _lengths(rows: Rows, room: Room) -> list[int]:
    """Tokens of each; empty where it takes more than ``tokenizer.json`` to tell."""
    tokenizer = _tokenizer(room) if rows else None
    if tokenizer is None:
        return []
    lengths = []
    for place, row in rows:
        with _at(place):
            lengths.append(len(tokenizer.encode(row.prompt, tools=row.tools)))
    return lengths


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except DataError as problem:
        raise DataError(f"{place}: {problem}") from problem


def _tokenizer(room: Room) -> PromptTokenizer | None:
    if not (room.folder / "tokenizer.json").is_file() or _has_code(room.folder):
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every prompt that is too long
    next_step = "Take tokenizer.json and tokenizer_config.json from where the checkpoint came from."
    with boundary(f"the tokenizer in {room.folder}", "reading it", error=DataError, next_step=next_step):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(room.folder)
    return PromptTokenizer(
        tokenizer,
        room.folder,
        apply_chat_template=room.apply_chat_template,
        template_arguments=room.template_arguments,
    )


def _has_code(folder: Path) -> bool:
    try:
        return "auto_map" in read_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return False


def _share_unknown(rows: Rows, room: Room) -> float:
    """The share of the prompts' tokens that stand for text that the tokenizer does not know."""
    prompts = _tokenizer(room) if rows and _can_be_unknown(room.folder) else None
    if prompts is None:
        return 0.0
    ids: list[int] = []
    for place, row in rows:
        with _at(place):
            ids += prompts.encode(row.prompt, tools=row.tools)
    return ids.count(prompts.tokenizer.unk_token_id) / max(1, len(ids))


def _can_be_unknown(folder: Path) -> bool:
    """Whether the tokenizer has a token for what it does not know, and does not write it byte by byte."""
    try:
        model = read_object(folder / "tokenizer.json")["model"]
        return bool(model["unk_token"]) and not model.get("byte_fallback")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
