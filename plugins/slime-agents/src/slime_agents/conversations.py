"""Conversations of an external agent, as branches of the token ids that the engines read and sampled.

Rollout   all conversations of one run of the agent
Branch    one conversation: its messages, and the trajectory that recorded it
Request   one chat completion request of the agent
Reply     one answer to it

Each request contains a whole message history. If the history starts with messages that a branch has recorded, the
branch's ids are reused and only the new messages are rendered. Rendering the whole history again could give other ids
than the model sampled (a text has several encodings, and chat templates leave reasoning out), and the sampled ids could
then not be trained.

Any other history starts a new branch, and the rollout counts the reason (``Rollout.breaks``):

    edited       a message of the history differs from the recorded one
    truncated    messages of the history were left out
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from slime_core import Sample
from slime_core.generation import GenerateContext, SamplingParams, Trajectory, Turn
from slime_core.types import JsonValue

__all__ = ["Branch", "Break", "Message", "ReadMessage", "Reply", "Request", "Rollout", "TooLongError", "TurnsUsedError"]

Message = Mapping[str, JsonValue]
ReadTurn = Callable[[Turn, Sequence[int]], Awaitable["ReadMessage"]]
"""Builds the assistant message of a turn, given the turn and the ids before it."""
Break = Literal["edited", "truncated"]


class TooLongError(Exception):
    """The history leaves no room for an answer in the model's context."""


class TurnsUsedError(Exception):
    """The agent has used all turns of its rollout (``--max-turns``)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One chat completion request of an agent.

    Arguments:
        messages: the history, in the format of OpenAI's chat completions.
        tools: descriptions of functions; empty: no tools.
        max_tokens: limit on the answer, in tokens; None means the limit of the run.
        stop: texts that end the answer, in addition to those of the run.
        n: number of answers.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A turn as the agent receives it, and the answers to its invalid calls, which the agent does not see.

    Arguments:
        message: the assistant message, without the invalid calls.
        errors: (position among all calls of the turn, tool message for the model), by position.
    """

    message: Message
    errors: tuple[tuple[int, Message], ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to a request.

    Arguments:
        turn: the sampled turn.
        message: the assistant message that the agent receives and sends back in later histories.
        prompt_tokens: number of tokens that the engine read.
        sampled_tokens: number of tokens that it sampled, including turns whose calls were all invalid.
    """

    turn: Turn
    message: Message
    prompt_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of a reply in a branch.

    Arguments:
        messages: number of messages so far, including the reply.
        ids: number of response ids so far.
        errors: answers to invalid calls of the reply; they precede or join the tool messages of the next request.
    """

    messages: int
    ids: int
    errors: tuple[tuple[int, Message], ...] = ()


@dataclass(slots=True)
class Branch:
    """One conversation.

    Arguments:
        trajectory: records the ids.
        tools: tool descriptions of its first request.
        history: the messages so far, including the newest reply.
        ends: the end of each reply.
        turns: for each turn sampled in this branch, the number of its answer in the order of the rollout's answers.
        is_busy: True while a request of the branch is in flight.
    """

    trajectory: Trajectory
    tools: tuple[JsonValue, ...]
    history: list[Message] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_busy: bool = False

    def recorded(self, request: Request) -> int:
        """Return the number of replies of this branch with which the history of ``request`` starts."""
        if self.tools != request.tools:
            return 0
        same = _common(self.history, request.messages)
        return sum(end.messages <= same and end.messages < len(request.messages) for end in self.ends)


class Rollout:
    """All conversations of one run of an agent; they become samples that share one rollout id.

    Arguments:
        context: the engines and the tokenizer.
        sample: the sample to generate; every conversation becomes a copy of it.
        sampling: sampling parameters of the run. A request's ``max_tokens`` and ``stop`` can only tighten them. Its
            temperature is ignored: tokens sampled at another temperature are not samples of the trained policy.
        max_turns: limit on answers over all conversations; may be infinite.

    Attributes:
        sample: the given sample; never changed.
        num_turns: number of answers requested so far.
        num_retries: number of turns sampled because all calls of the turn before were invalid.
        breaks: reason -> number of histories that should have continued a conversation but started a branch.
    """

    def __init__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams, *, max_turns: float) -> None:
        self._context = context
        self.sample = sample
        self._sampling = sampling
        self._max_turns = max_turns
        self._branches: list[Branch] = []
        self.num_turns = 0
        self.num_retries = 0
        self.breaks: Counter[Break] = Counter()

    @property
    def num_branches(self) -> int:
        """Number of conversations with at least one sampled turn."""
        return sum(bool(branch.turns) for branch in self._branches)

    async def answer(self, request: Request, read: ReadTurn) -> list[Reply]:
        """Return ``request.n`` answers; the agent can continue each of them.

        Raises:
            TooLongError: the history leaves no room for an answer.
            TurnsUsedError: the agent has used all its turns.
            Interrupted: a turn was aborted; the rollout ends.
            EngineError: no engine answered.
            DataError: the chat template refuses the messages.
        """
        if self._turns_used + request.n > self._max_turns:
            raise TurnsUsedError
        first = self._branch(request)
        if first.trajectory.is_full:
            first.is_busy = False
            raise TooLongError
        branches = [first, *(self._copy(first) for _ in range(request.n - 1))]
        numbers = range(self.num_turns, self.num_turns + request.n)
        self.num_turns += request.n
        turns = [self._turn(branch, request, read, at) for branch, at in zip(branches, numbers, strict=True)]
        return await asyncio.gather(*turns)

    def finish(self) -> list[Sample]:
        """Return one sample for each conversation with a sampled turn, in the order in which they started."""
        return self._as_one([branch.trajectory.finish() for branch in self._branches if branch.turns])

    def finish_turns(self, rewards: Sequence[float]) -> list[Sample]:
        """Return one sample for each answer, with its reward.

        Arguments:
            rewards: one reward for each answer, in the order of the requests.
        """
        samples = []
        for branch in (candidate for candidate in self._branches if candidate.turns):
            for number, sample in zip(branch.turns, branch.trajectory.finish_turns(), strict=True):
                sample.reward = rewards[number]
                samples.append(sample)
        return self._as_one(samples)

    def _as_one(self, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            sample.rollout_id = (sample.index or 0) if len(samples) > 1 else None
        return samples

    def _branch(self, request: Request) -> Branch:
        """Return a branch whose history ends with the messages of ``request``; it is marked busy."""
        best = max(self._branches, key=lambda branch: branch.recorded(request), default=None)
        replies = 0 if best is None else best.recorded(request)
        if best is None or not replies:
            self._count_break(request)
            return self._new(request)
        end = best.ends[replies - 1]
        if best.is_busy or replies < len(best.ends) or len(best.history) > end.messages:
            best = self._fork(best, replies, end)
        added = request.messages[end.messages :]
        best.trajectory.append_message(*_with_errors(added, end.errors))
        best.history += added
        best.is_busy = True
        return best

    def _new(self, request: Request) -> Branch:
        # A deep copy, because the caller's sample is reused if generation restarts.
        metadata = deepcopy(self.sample.metadata) | ({"tools": list(request.tools)} if request.tools else {})
        parent = replace(self.sample, prompt=[dict(message) for message in request.messages], metadata=metadata)
        trajectory = self._context.start(parent)
        if trajectory.is_full:
            raise TooLongError
        branch = Branch(trajectory, request.tools, history=list(request.messages), is_busy=True)
        self._branches.append(branch)
        return branch

    def _fork(self, branch: Branch, replies: int, end: End) -> Branch:
        history = branch.history[: end.messages]
        other = Branch(branch.trajectory.fork(end.ids), branch.tools, history, ends=branch.ends[:replies])
        self._branches.append(other)
        return other

    def _copy(self, branch: Branch) -> Branch:
        """Copy ``branch`` with its pending request, to sample another answer."""
        other = Branch(branch.trajectory.fork(), branch.tools, list(branch.history), list(branch.ends), is_busy=True)
        self._branches.append(other)
        return other

    async def _turn(self, branch: Branch, request: Request, read: ReadTurn, number: int) -> Reply:
        trajectory = branch.trajectory
        try:
            prompt, sampled = trajectory.token_ids, 0
            while True:
                before = trajectory.token_ids
                turn = await trajectory.generate(self._limited(request))
                sampled += len(turn.token_ids)
                if turn.token_ids:
                    branch.turns.append(number)
                answer = await read(turn, before)
                if not self._is_retried(answer, turn):
                    break
                trajectory.append_message(*(message for _, message in answer.errors))
                self.num_retries += 1
            branch.history.append(answer.message)
            branch.ends.append(End(len(branch.history), trajectory.response_length, answer.errors))
            return Reply(turn, answer.message, len(prompt), sampled)
        finally:
            branch.is_busy = False

    @property
    def _turns_used(self) -> int:
        return self.num_turns + self.num_retries

    def _is_retried(self, answer: ReadMessage, turn: Turn) -> bool:
        """Return whether the model must answer again: all calls of ``turn`` are invalid, so the agent would take the
        turn for a final answer."""
        is_answer = not answer.errors or bool(answer.message.get("tool_calls"))
        return not is_answer and turn.finish_reason != "length" and self._turns_used < self._max_turns

    def _limited(self, request: Request) -> SamplingParams:
        sampling = self._sampling
        limit = sampling.max_new_tokens if request.max_tokens is None else request.max_tokens
        return replace(
            sampling,
            max_new_tokens=min(limit, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys([*sampling.stop, *request.stop])),
        )

    def _count_break(self, request: Request) -> None:
        """Count the reason why ``request`` continues no branch although its history contains replies."""
        if not any(message.get("role") == "assistant" for message in request.messages):
            return  # a new conversation
        ended = [branch for branch in self._branches if branch.ends]
        if not ended:
            return  # no reply is recorded yet: the agent sent a history that it did not sample here
        is_part = any(_is_part(request.messages, branch.history) for branch in ended)
        self.breaks["truncated" if is_part else "edited"] += 1


def _with_errors(messages: Sequence[Message], errors: Sequence[tuple[int, Message]]) -> list[Message]:
    """Insert the answers to invalid calls among the tool messages with which ``messages`` start."""
    answers = list(takewhile(lambda message: message.get("role") == "tool", messages))
    others = messages[len(answers) :]
    for position, error in errors:
        answers.insert(position, error)
    return [*answers, *others]


def _common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Return the number of messages with which both sequences start."""
    count = 0
    for message, other in zip(first, second, strict=False):
        if _plain(message) != _plain(other):
            break
        count += 1
    return count


def _is_part(messages: Sequence[Message], history: Sequence[Message]) -> bool:
    """Return whether all of ``messages`` but the newest, which may be new, occur in ``history`` in this order."""
    remaining = iter([_plain(message) for message in history])
    return all(any(_plain(message) == other for other in remaining) for message in messages[:-1])


def _plain(message: Message) -> tuple[JsonValue, ...]:
    """Return the fields by which messages are compared: clients omit empty fields and format JSON differently."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return (
        message.get("role"),
        content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True),
        message.get("tool_call_id"),
        json.dumps([_plain_call(call) for call in calls]) if isinstance(calls, list) and calls else None,
    )


def _plain_call(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True)]
