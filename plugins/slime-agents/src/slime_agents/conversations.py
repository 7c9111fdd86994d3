"""What an agent outside has sent and was answered, as branches of the ids that the engines read and sampled.

Rollout   all conversations of one run of the agent
Branch    one conversation: its messages, and the trajectory that recorded it
Request   what an agent asks for
Reply     what it gets

Each request of an agent holds a whole history. Where that history is one that was recorded, messages and all, the
recorded ids stand in for it, and only its new messages are rendered. Rendering the whole history again could give other
ids than the model sampled (text encodes in several ways, and templates leave reasoning out), and what was sampled could
then not be trained.

Other histories start a branch of their own, and the rollout counts why (``Rollout.breaks``):

    edited       a message of the history is not as it was recorded
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
from typing import Literal

from slime_core import Sample
from slime_core.generation import GenerateContext, SamplingParams, Trajectory, Turn
from slime_core.types import JsonValue

__all__ = ["Branch", "Break", "Message", "Reply", "Request", "Rollout", "TooLongError", "TurnsUsedError"]

Message = Mapping[str, JsonValue]
ReadTurn = Callable[[Turn], Awaitable[Message]]
"""Makes the message of a turn."""
Break = Literal["edited", "truncated"]


class TooLongError(Exception):
    """The history leaves no room for an answer."""


class TurnsUsedError(Exception):
    """The agent has had all turns of its rollout."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks for.

    Arguments:
        messages: the history, as OpenAI's chat completions take it.
        tools: descriptions of functions; empty: none.
        max_tokens: longest answer; None: as the run says.
        stop: texts that end the answer, in addition to those of the run.
        n: answers.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Arguments:
        turn: as the engine sampled it.
        message: as the agent gets it, and will send it back as part of a history.
        prompt_tokens: that the engine read.
    """

    turn: Turn
    message: Message
    prompt_tokens: int


@dataclass(slots=True)
class Branch:
    """One conversation.

    Arguments:
        trajectory: its ids.
        tools: that it started with.
        history: the messages so far, the newest reply included.
        ends: messages and response ids after each reply.
        turns: which of the rollout's answers were sampled here.
        is_busy: a request of it is in flight.
    """

    trajectory: Trajectory
    tools: tuple[JsonValue, ...]
    history: list[Message] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_busy: bool = False

    def recorded(self, request: Request) -> int:
        """Replies of this conversation with which the history of ``request`` starts; 0: with none."""
        if self.tools != request.tools:
            return 0
        same = _common(self.history, request.messages)
        return sum(messages <= same and messages < len(request.messages) for messages, _ in self.ends)


class Rollout:
    """All conversations of one run of an agent, which become samples that count as one.

    Arguments:
        context: the engines and the tokenizer.
        sample: what the run is for; every conversation becomes a copy of it.
        sampling: of the run; a request's ``max_tokens`` and ``stop`` only tighten it, since tokens of another
            temperature are no samples of the policy that is trained.
        max_turns: answers, in all conversations together; may be infinite.

    Attributes:
        sample: as it was given; it stays as it is.
        num_turns: requests for an answer.
        breaks: why histories started a branch although the agent went on with a conversation -> how often.
    """

    def __init__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams, *, max_turns: float) -> None:
        self._context = context
        self.sample = sample
        self._sampling = sampling
        self._max_turns = max_turns
        self._branches: list[Branch] = []
        self.num_turns = 0
        self.breaks: Counter[Break] = Counter()

    @property
    def num_branches(self) -> int:
        """Conversations that have a turn of their own."""
        return sum(bool(branch.turns) for branch in self._branches)

    async def answer(self, request: Request, read: ReadTurn) -> list[Reply]:
        """``request.n`` answers, each of which the agent may continue.

        Raises:
            TooLongError: the history leaves no room.
            TurnsUsedError: the agent has had all its turns.
            Interrupted: a turn was aborted; the rollout is over.
            EngineError: no engine answered.
            DataError: the chat template refuses the messages.
        """
        if self.num_turns + request.n > self._max_turns:
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
        """The conversations that have a turn, each as a sample, in the order in which they started."""
        return self._as_one([branch.trajectory.finish() for branch in self._branches if branch.turns])

    def finish_turns(self, rewards: Sequence[float]) -> list[Sample]:
        """A sample for each answer, with its reward.

        Arguments:
            rewards: one for each answer, in the order of the requests.
        """
        found = []
        for branch in (one for one in self._branches if one.turns):
            for number, sample in zip(branch.turns, branch.trajectory.finish_turns(), strict=True):
                sample.reward = rewards[number]
                found.append(sample)
        return self._as_one(found)

    def _as_one(self, samples: list[Sample]) -> list[Sample]:
        for sample in samples:
            sample.rollout_id = (sample.index or 0) if len(samples) > 1 else None
        return samples

    def _branch(self, request: Request) -> Branch:
        """A conversation that ends with the messages of ``request``."""
        best = max(self._branches, key=lambda branch: branch.recorded(request), default=None)
        replies = 0 if best is None else best.recorded(request)
        if best is None or not replies:
            self._count_break(request)
            return self._new(request)
        messages, ids = best.ends[replies - 1]
        if best.is_busy or replies < len(best.ends) or len(best.history) > messages:
            best = self._fork(best, replies, ids)
        added = request.messages[messages:]
        best.trajectory.append_message(*added)
        best.history += added
        best.is_busy = True
        return best

    def _new(self, request: Request) -> Branch:
        # A copy: a sample that is generated again has the prompt of its row.
        metadata = deepcopy(self.sample.metadata) | ({"tools": list(request.tools)} if request.tools else {})
        own = replace(self.sample, prompt=[dict(one) for one in request.messages], metadata=metadata)
        trajectory = self._context.start(own)
        if trajectory.is_full:
            raise TooLongError
        branch = Branch(trajectory, request.tools, history=list(request.messages), is_busy=True)
        self._branches.append(branch)
        return branch

    def _fork(self, branch: Branch, replies: int, ids: int) -> Branch:
        messages, _ = branch.ends[replies - 1]
        other = Branch(branch.trajectory.fork(ids), branch.tools, branch.history[:messages], ends=branch.ends[:replies])
        self._branches.append(other)
        return other

    def _copy(self, branch: Branch) -> Branch:
        """Another branch with the same request, for another answer to it."""
        other = Branch(branch.trajectory.fork(), branch.tools, list(branch.history), list(branch.ends), is_busy=True)
        self._branches.append(other)
        return other

    async def _turn(self, branch: Branch, request: Request, read: ReadTurn, number: int) -> Reply:
        trajectory = branch.trajectory
        try:
            prompt_tokens = len(trajectory.token_ids)
            turn = await trajectory.generate(self._limited(request))
            if turn.token_ids:
                branch.turns.append(number)
            message = await read(turn)
            branch.history.append(message)
            branch.ends.append((len(branch.history), trajectory.response_length))
            return Reply(turn, message, prompt_tokens)
        finally:
            branch.is_busy = False

    def _limited(self, request: Request) -> SamplingParams:
        sampling = self._sampling
        limit = sampling.max_new_tokens if request.max_tokens is None else request.max_tokens
        return replace(
            sampling,
            max_new_tokens=min(limit, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys([*sampling.stop, *request.stop])),
        )

    def _count_break(self, request: Request) -> None:
        """Note why ``request``, which has replies in its history, continues no conversation."""
        if not any(one.get("role") == "assistant" for one in request.messages):
            return  # a conversation of its own
        found = [branch for branch in self._branches if branch.ends]
        if not found:
            return  # the agent brought the history along
        kept = any(_is_part(request.messages, branch.history) for branch in found)
        self.breaks["truncated" if kept else "edited"] += 1


def _common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Messages with which both start."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if _plain(one) != _plain(other):
            break
        count += 1
    return count


def _is_part(messages: Sequence[Message], history: Sequence[Message]) -> bool:
    """Whether all of ``messages`` but the newest, which may be new, stand in ``history`` in this order."""
    rest = iter([_plain(one) for one in history])
    return all(any(_plain(one) == other for other in rest) for one in messages[:-1])


def _plain(message: Message) -> tuple[JsonValue, ...]:
    """What of a message counts when it is compared: clients leave empty fields out, and write JSON in other ways."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return (
        message.get("role"),
        content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True),
        message.get("tool_call_id"),
        json.dumps([_plain_call(one) for one in calls]) if isinstance(calls, list) and calls else None,
    )


def _plain_call(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True)]
