"""Finds what the assistant wrote in a conversation, as the model would have sampled it: after the generation prompt, up
to the token that ends the turn. It works for any chat template and needs no name of a family.

    turn       the messages before it, rendered with the generation prompt, are the request to an engine. Rendered
               again with the turn, the text continues this prompt: the continuation is trained
    thoughts   if the template leaves out thoughts of the message, or the generation prompt opens thoughts that the
               template does not write, the message's text is trained, and the template's text after it
    end        the first token after the text of the message at which engines stop. If there is none, but the template
               opens the next turn with one (GLM), that one
    sequence   a turn continues the sequence of the turn before it if its prompt does. If not, because the template
               leaves thoughts out of earlier turns, it starts another sequence

Every turn is compared with the messages: it ends with the text of its message and contains no other message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slime_core.errors import DataError
from slime_core.prompts.chat import PLACEHOLDER, PromptEncoder

__all__ = ["Conversation", "Turn", "conversations"]

Message = Mapping[str, Any]
Tools = Sequence[Any] | None

ASSISTANT = "assistant"

OPENED = re.compile(r"<([\w:]*think)>\s*$")
"""The end of a generation prompt after which the model writes thoughts."""

CLOSED = re.compile(r"</[\w:]*think>\s*$")
"""The end of a generation prompt after which it writes none."""

THINK, END_THINK = "<think>", "</think>"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold thoughts beside the content."""

TRAINS = "step_loss_mask"
"""slime's field of a message: 0 leaves it out of the loss."""

SHOWN = 80
"""Characters of a turn in a message."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant.

    Example, ``<|user|>1+1<|assistant|>2<eos>``: ``Turn(1, "<|user|>1+1<|assistant|>", "2", "<eos>")``.

    Arguments:
        place: of the message in the conversation, from 0.
        prompt: text that an engine would get before the turn.
        text: text that the model would have sampled before the end token.
        end: the end token, or a special token of the template at which no engine stops.
        stops: engines stop at ``end``.
        lacks_thoughts: the message holds thoughts, and the text does not.
    """

    place: int
    prompt: str
    text: str
    end: str
    stops: bool = True
    lacks_thoughts: bool = False

    @property
    def trained(self) -> str:
        """The text that is trained."""
        return self.text + self.end


@dataclass(frozen=True, slots=True)
class Conversation:
    """A sequence of tokens with one or more turns of the assistant, which ends with the last of them.

    Example, ``<|user|>1+1<|assistant|>2<eos>``: ids ``[3, 6, 15, 6, 4, 7, 1]``, mask ``[0, 0, 0, 0, 0, 1, 1]``.

    Arguments:
        token_ids: ids of the sequence.
        mask: 1 for tokens of ``turns``.
        turns: those that are trained; turns before them are only read.
    """

    token_ids: list[int]
    mask: list[int]
    turns: list[Turn]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained token."""
        return self.mask.index(1)


def conversations(encoder: PromptEncoder, messages: Sequence[Message], *, tools: Tools = None) -> list[Conversation]:
    """Tokenize ``messages``; each turn of the assistant is trained in one of the returned sequences, except those
    whose message has ``step_loss_mask`` 0.

    Raises:
        DataError: the assistant has no turn, the template refuses the messages, or a turn is not what its message
            holds; names the message by its place, from 0.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not places or places[0] == 0:
        problem = "starts with a message of the assistant" if places else "has no message of the assistant"
        raise DataError(f"the conversation {problem}; accepted: a user message, then at least one of the assistant")
    places = [place for place in places if messages[place].get(TRAINS, 1) != 0]
    if not places:
        raise DataError(f"{TRAINS} is 0 in every message of the assistant; accepted: at least one that is trained")
    messages = encoder.template(tools).normal_form(messages)
    sequences: list[list[Turn]] = []
    for place in places:
        try:
            turn = _Rendering(encoder, messages, place, tools).turn()
        except DataError as problem:
            raise DataError(f"message {place}: {problem}") from None
        if sequences and turn.prompt.startswith(sequences[-1][-1].prompt + sequences[-1][-1].trained):
            sequences[-1].append(turn)
        else:
            sequences.append([turn])
    return [_tokenized(encoder, turns) for turns in sequences]


# --- One turn --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a message of the assistant.

    Arguments:
        thoughts: None: it holds none.
        answer: the text after the thoughts.
        whole: both as one text.
        calls: names of the tools that it calls.
        in_text: the thoughts are in the content, not in a separate field.
    """

    thoughts: str | None
    answer: str
    whole: str
    calls: list[str]
    in_text: bool

    @classmethod
    def of(cls, message: Message) -> _Content:
        text, calls = _text(message), _calls(message)
        before, end, answer = text.rpartition(END_THINK)
        if end:
            return cls(before.partition(THINK)[2] or before, answer, text, calls, in_text=True)
        thoughts = next((message[key] for key in REASONING if isinstance(message.get(key), str)), None)
        content = text if thoughts is None else f"{THINK}\n{thoughts.strip()}\n{END_THINK}\n\n{text}"
        return cls(thoughts, text, content, calls, in_text=False)

    def is_lost_in(self, text: str) -> bool:
        """Return whether the message has thoughts that ``text`` lacks."""
        return self.thoughts is not None and self.thoughts.strip() not in text

    def after(self, opened: re.Match[str]) -> str:
        """The text after a generation prompt that has opened thoughts; they are empty if the message holds none."""
        tag, end, line = f"<{opened[1]}>", f"</{opened[1]}>", "\n" * opened[0].endswith("\n")
        if self.thoughts is None and not self.whole.lstrip().startswith(tag):
            return f"{line}{end}{line}{line}{self.answer}"
        return self.whole.lstrip().removeprefix(tag).removeprefix(line)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content or [] if isinstance(part, Mapping))


def _calls(message: Message) -> list[str]:
    """Return the names of the tools that a message in the template's form calls."""
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


class _Rendering:
    """Renders the messages up to a turn of the assistant in several ways, to find the turn.

    Arguments:
        place: of the turn's message in ``messages``.
    """

    def __init__(self, encoder: PromptEncoder, messages: Sequence[Message], place: int, tools: Tools) -> None:
        self._encoder = encoder
        self._messages = messages
        self._place = place
        self._before = messages[:place]
        self._tools = tools
        self._content = _Content.of(messages[place])

    def turn(self) -> Turn:
        """Return the turn; raises DataError if it is not what its message holds."""
        prompt, header, text = self._after_prompt()
        text, end, stops = self._ended(text)
        self._check_own(header, text)
        self._check_others(text)
        return Turn(self._place, prompt, text, end, stops, self._content.is_lost_in(text))

    def _after_prompt(self) -> tuple[str, str, str]:
        """Return the prompt of the turn, the header at the prompt's end, and the text after it."""
        prompt, bare = self._render(self._before, asks=True), self._render(self._before)
        written = self._render([*self._before, self._messages[self._place]])
        if prompt == bare:  # no generation prompt: a header that the template writes is not part of the turn
            head, _ = self._around()
            if self._content.whole and head[len(bare) :].strip() and written.startswith(head):
                prompt = head
        header = prompt[_common(bare, prompt) :]
        opened, text = OPENED.search(header), None
        if written.startswith(prompt):
            text = written[len(prompt) :]
        elif opened is None and header.strip() and header in written:
            # The turn changes how the messages before it are written, not itself.
            text = written.rpartition(header)[2]
        if text is not None and not self._spoils_thoughts(text, opened):
            return prompt, header, text
        _, tail = self._around()
        if opened is not None:
            return prompt, header, self._content.after(opened) + tail
        answer = self._content.answer.lstrip("\n") if CLOSED.search(header) else self._content.whole
        return prompt, header, answer + tail

    def _spoils_thoughts(self, text: str, opened: re.Match[str] | None) -> bool:
        """Return whether the template supports thoughts and omits these, or writes empty thoughts before them."""
        content = self._content
        if not content.in_text:
            return opened is not None and content.is_lost_in(text)
        return content.is_lost_in(text) or text.count(END_THINK) > content.whole.count(END_THINK)

    def _ended(self, text: str) -> tuple[str, str, bool]:
        """Split ``text`` into the turn and the token that ends it, and whether engines stop there. The rest is lost."""
        answer = self._content.answer.strip()
        first = text.rfind(answer) + len(answer) if answer and answer in text else 0
        stops = self._stops()
        ends = [(text.index(stop, first), stop) for stop in stops if stop in text[first:]]
        if ends:
            start, stop = min(ends)
            return text[:start], stop, True
        following = self._following()
        for stop in stops:
            if following.startswith(stop):
                return text, stop, True
        for token in self._encoder.tokenizer.added_tokens_decoder.values():
            if token.special and text.rstrip().endswith(str(token)):
                return text.rstrip().removesuffix(str(token)), str(token), False
        return text, "", False

    def _stops(self) -> list[str]:
        """The tokens at which engines stop; an id that is ordinary text, of a config that is not the tokenizer's, is
        none."""
        encoder, added = self._encoder, self._encoder.tokenizer.added_tokens_decoder
        ids = [token for token in encoder.end_ids if token in added or token == encoder.end_of_sequence]
        return [stop for stop in (encoder.decode_all([token]) for token in ids) if stop]

    def _following(self) -> str:
        """Return the text that the template writes right after the turn as soon as another message follows."""
        _, tail = self._around()
        role = "tool" if self._content.calls else "user"
        try:
            _, longer = self._around({"role": role, "content": "?"})
        except DataError:  # some templates require more of a tool's message
            return ""
        return longer.removeprefix(tail) if longer.startswith(tail) else ""

    def _around(self, *following: Message) -> tuple[str, str]:
        """Return the text that the template writes before and after the content of the turn, without thoughts."""
        marked = {key: value for key, value in self._messages[self._place].items() if key not in REASONING}
        text = self._render([*self._before, {**marked, "content": PLACEHOLDER}, *following])
        if text.count(PLACEHOLDER) != 1:
            raise DataError(
                "the chat template changes the content of the turn, so that its start and end cannot "
                "be found. Give another template (tokenizer_config.json, chat_template.jinja)"
            )
        head, _, tail = text.partition(PLACEHOLDER)
        return head, tail

    def _render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        return self._encoder.render(messages, tools=self._tools, asks=asks)

    # --- The turn against the messages -------------------------------------------------------------------------------

    def _check_own(self, header: str, text: str) -> None:
        """Raise DataError unless ``text`` ends with the answer, holds every call and starts after the header."""
        opened, answer = OPENED.search(header), self._content.answer.strip()
        if opened is not None:  # thoughts that never end: their start is in the prompt
            answer = answer.removeprefix(f"<{opened[1]}>").strip()
        lost = [name for name in self._content.calls if name not in text]
        if lost:
            raise DataError(
                f"the chat template does not write its call of {lost[0]!r}, so the turn would be trained without it. "
                "Take a template that writes tool calls"
            )
        after = text[text.rfind(answer) + len(answer) :] if answer else ""
        if answer not in text or (after.strip() and after.strip() not in self._around()[1]):
            raise DataError(
                f"the chat template makes {_shown(text)} of it, which does not end with its text, {_shown(answer)}. "
                "Correct the template, or write the message as the template expects it"
            )
        role = header.strip()
        if role and text.lstrip().startswith(role) and not self._content.whole.lstrip().startswith(role):
            raise DataError(
                f"the chat template makes {_shown(text)} of it, which starts with the header of a turn. Correct the "
                "template: its generation prompt writes that header already"
            )

    def _check_others(self, text: str) -> None:
        """Raise DataError if the text contains another message; text of the template does not count."""
        if self._content.calls:  # arguments of a call may quote any message
            return
        remaining = text
        for part in (self._content.whole, self._content.answer, self._content.thoughts or "", THINK, END_THINK):
            if part.strip() and part.strip() in remaining:
                remaining = "".join(remaining.rpartition(part.strip())[::2])
                if part is self._content.whole:
                    break
        template = str(self._encoder.tokenizer.chat_template)
        for place, message in enumerate(self._messages):
            other = _text(message).strip()
            if place != self._place and other and other in remaining and other not in template:
                raise DataError(
                    f"the chat template makes {_shown(text)} of it, which holds message {place} too. Correct the "
                    "template"
                )


def _common(text: str, other: str) -> int:
    """Number of letters with which both start."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}...{text[-SHOWN // 2 :]}")


# --- Tokens ----------------------------------------------------------------------------------------------------------


def _tokenized(encoder: PromptEncoder, turns: list[Turn]) -> Conversation:
    """Tokenize prompts and turns one by one, as engines do: they read a prompt and sample its continuation."""
    text = turns[-1].prompt + turns[-1].trained
    borders = [0]
    for turn in turns:
        borders += [len(turn.prompt), len(turn.prompt) + len(turn.trained)]
    pieces = [encoder.encode_text(text[start:stop]) for start, stop in pairwise(borders)]
    ids = [token for piece in pieces for token in piece]
    mask = [number % 2 for number, piece in enumerate(pieces) for _ in piece]
    if encoder.decode_all(ids) != encoder.decode_all(encoder.encode_text(text)):
        # A tokenizer may add a space in front of every text, or drop one after a special token.
        ids, mask = _by_letters(encoder, text, turns)
    if 1 not in mask:
        raise DataError("the messages of the assistant have no tokens; accepted: a message with a text")
    return Conversation(ids, mask, turns)


def _by_letters(encoder: PromptEncoder, text: str, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Tokenize ``text`` at once, and train the tokens that cover letters of a turn."""
    ids, covered = encoder.spans(text)
    mask = [0] * len(ids)
    for turn in turns:
        start, stop = len(turn.prompt), len(turn.prompt) + len(turn.trained)
        inside = [number for number, (first, last) in enumerate(covered) if start <= first < last <= stop]
        letters = encoder.decode_all([ids[number] for number in inside])
        if letters.strip() != turn.trained.strip():
            raise DataError(
                f"message {turn.place}: the tokenizer joins letters of the turn {_shown(turn.trained)} with letters "
                "outside. Remove spaces and line ends from the start of the message"
            )
        for number in inside:
            mask[number] = 1
    return ids, mask
