"""Finds the tokens of a conversation that the assistant wrote, and the token that ends each of its turns.

The conversation is rendered and tokenized once; these are the trained tokens. To find where a turn starts and ends, the
messages before it and the messages up to it are rendered again: both texts must be a prefix of the whole text. If they
are not, the template is refused, except for the known families:

    prefix        every prefix of a conversation is rendered as it is in the whole
    qwen3         thoughts are left out of all but the last turns, so a turn ends at its end token
    distill_qwen  thoughts are left out of all turns, and the generation prompt may contain the start of an answer

Every conversation is checked: the trained tokens must decode to exactly the text of the turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder

__all__ = ["Conversation", "Family", "conversation"]

Family = Literal["prefix", "qwen3", "distill_qwen"]

Messages = Sequence[Mapping[str, Any]]

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tokenized conversation.

    Example, ``<|user|>1+1<|assistant|>2<eos>``: ids ``[3, 6, 15, 6, 4, 7, 1]``, mask ``[0, 0, 0, 0, 0, 1, 1]``.

    Arguments:
        token_ids: ids of the whole conversation, as the template renders it.
        mask: 1 for tokens of the assistant.
        turns: the text of each turn of the assistant, with its end token.
    """

    token_ids: list[int]
    mask: list[int]
    turns: list[str]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained token."""
        return self.mask.index(1)


def conversation(
    encoder: PromptEncoder, messages: Messages, *, family: Family, tools: Sequence[Any] | None = None
) -> Conversation:
    """Tokenize ``messages`` and mark the assistant's tokens.

    Raises:
        DataError: the assistant has no turn, the template does not match the family, or a token lies partly inside a
            turn.
    """
    whole = encoder.render(messages, tools=tools, asks=False)
    turns = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns or turns[0] == 0:
        found = "starts with a message of the assistant" if turns else "has no message of the assistant"
        raise DataError(f"the conversation {found}; accepted: a user message, then at least one of the assistant")
    spans = [_span(encoder, messages, place, whole, family=family, tools=tools) for place in turns]
    _refuse_overlaps(spans)
    ids, covered = encoder.spans(whole)
    mask = [int(any(start <= first < last <= stop for start, stop in spans)) for first, last in covered]
    texts = [whole[start:stop] for start, stop in spans]
    _refuse_other_tokens(encoder, ids, covered, spans, whole)
    if 1 not in mask:
        raise DataError("the messages of the assistant have no tokens; accepted: a message with a text")
    return Conversation(ids, mask, texts)


def _span(
    encoder: PromptEncoder, messages: Messages, place: int, whole: str, *, family: Family, tools: Sequence[Any] | None
) -> tuple[int, int]:
    """Return start and end of turn ``place`` in the text: after the generation prompt, and after its end token."""
    before = encoder.render(messages[:place], tools=tools, asks=True)
    start = len(before)
    if family == "distill_qwen":
        start = _after_special(encoder, _common_prefix(before, whole))
    elif not whole.startswith(before):
        raise _unstable(place, "the messages before it", family)
    if family != "prefix":
        return start, _after_end(encoder, whole, start, place)
    with_it = encoder.render(messages[: place + 1], tools=tools, asks=False)
    if not whole.startswith(with_it) or len(with_it) < start:
        raise _unstable(place, "the messages up to it", family)
    return start, _after_special(encoder, with_it, start) or len(with_it)


def _common_prefix(one: str, other: str) -> str:
    different = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(different, min(len(one), len(other)))]


def _after_special(encoder: PromptEncoder, text: str, start: int = 0) -> int:
    """Return the end of the last special token of ``text`` from ``start`` on; 0: there is none."""
    ids, covered = encoder.spans(text)
    ends = [last for one, (first, last) in zip(ids, covered, strict=True) if first >= start and encoder.is_special(one)]
    return max(ends, default=0)


def _after_end(encoder: PromptEncoder, whole: str, start: int, place: int) -> int:
    """Return the end of the first end-of-sequence token from ``start`` on."""
    ids, covered = encoder.spans(whole)
    for one, (first, last) in zip(ids, covered, strict=True):
        if first >= start and one == encoder.end_of_sequence:
            return last
    raise DataError(
        f"message {place}: no end token follows it in the rendered conversation; try --loss-mask-type prefix"
    )


def _unstable(place: int, which: str, family: str) -> DataError:
    return DataError(
        f"message {place}: the chat template renders {which} differently alone than inside the whole conversation, so "
        f"--loss-mask-type {family} cannot find the message. Templates that leave thoughts out of "
        "earlier turns need --loss-mask-type qwen3 or distill_qwen; or end the conversation with this message"
    )


def _refuse_overlaps(spans: Sequence[tuple[int, int]]) -> None:
    for (_, stop), (start, _) in pairwise(spans):
        if start < stop:
            raise DataError(
                "two turns of the assistant overlap in the rendered conversation; try --loss-mask-type prefix"
            )


def _refuse_other_tokens(
    encoder: PromptEncoder,
    ids: Sequence[int],
    covered: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
    whole: str,
) -> None:
    for start, stop in spans:
        inside = [one for one, (first, last) in zip(ids, covered, strict=True) if start <= first < last <= stop]
        found, wanted = encoder.decode_all(inside), whole[start:stop]
        if found != wanted:
            raise DataError(
                f"the tokens of a turn of the assistant decode to {found[:60]!r}, but the turn is {wanted[:60]!r}: the "
                "tokenizer joins letters of the turn with letters outside. Remove spaces and line ends from the start "
                "of the message"
            )
