"""One response, generated turn by turn; generate functions start it with ``GenerateContext.start``.

    Trajectory      the prompt ids, then the model's turns and appended text, in one list of ids
    BranchError     raised for a request whose prompt does not continue the recorded ids
    Turn            one turn of the model, the result of ``Trajectory.generate``
    Interrupted     raised when a turn was aborted; ends the generate function

A trained position (mask 1) has the engine's log-probability; any other position (mask 0) has log-probability 0.0. One
exception: with ``masks_resumed``, the earlier tokens of a resumed response have mask 0 and the engine's
log-probability.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import uuid4

from slime_core.errors import DataError, RunError
from slime_core.generation.sampling import (
    FINISHED,
    FinishReason,
    Generation,
    Kept,
    SamplingParams,
    added,
    engine_inputs,
    join_routes,
    joined,
    joined_columns,
    keep,
    mask_of,
    pad_routes,
    routes_of,
    until_stop,
)
from slime_core.types import JsonValue, LogProbs, Mask, Sample, SpecInfo, Status, TokenIds, tools_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.generation.context import GenerateContext, ProcessedPrompt

NO_ROOM = "too_long"
"""Cause of a failure: the prompt fills the context."""

NOT_GENERATED = "not_generated"
"""Cause of a failure: the generate function finished a trajectory without a single token."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Example: ``Turn("72", [12, 7, 1], [-0.39, 0.0, 0.0], "stop")``.

    Arguments:
        text: decoded, without special tokens; a matched stop text is included.
        token_ids: as the engine returned them.
        log_probs: natural, one per token.
        finish_reason: ``stop``: an end token or stop text; ``length``: a budget was reached.
    """

    text: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


class Interrupted(RunError):
    """A turn was aborted: its request ended before the response did.

    A generate function must not catch it. The core takes ``sample``, which is ``ABORTED`` and holds the tokens so far.
    If the function's traits say ``resumes``, it gets the sample again and resumes it; otherwise the sample is
    restarted.
    """

    def __init__(self, message: str, sample: Sample) -> None:
        super().__init__(message, sample)
        self.sample = sample

    def __str__(self) -> str:
        return str(self.args[0])


class BranchError(DataError):
    """The prompt of a request does not start with the ids of the conversation that it should continue.

    Arguments:
        position: position of the first id that differs, prompt included.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class Trajectory:
    """The response to one sample, made by :meth:`GenerateContext.start`. Only :meth:`finish` changes the sample.

    Example, the model calls a calculator::

        trajectory = context.start(sample)
        while trajectory.num_turns < 4 and not trajectory.is_full:
            turn = await trajectory.generate(sampling)
            call = find_call(turn.text)
            if call is None:
                break
            trajectory.append_text(f"= {compute(call)}\\n")
        return trajectory.finish()

    Raises:
        DataError: the encoder refuses the prompt.
    """

    def __init__(self, context: GenerateContext, sample: Sample, *, prompt_ids: Sequence[int] | None = None) -> None:
        self._context = context
        self._sample = sample
        have = sample.response_length
        # The prompt for the engine, which inserts the further placeholders of images.
        if prompt_ids is not None:
            self._sent_prompt = list(prompt_ids)
        elif have and not (context.processor is not None and sample.multimodal_train_inputs):
            self._sent_prompt = list(sample.tokens[: sample.prompt_length])
        else:
            self._sent_prompt = context.encoder.encode(sample.prompt, tools=tools_of(sample.metadata))
        # The prompt for the trained model.
        self._prompt = list(sample.tokens[: sample.prompt_length]) if have else self._sent_prompt
        self._processed: ProcessedPrompt | None = None
        self._ids: list[int] = list(sample.tokens[sample.prompt_length :]) if have else []
        self._log_probs: list[float] = list(sample.rollout_log_probs or [0.0] * have) if have else []
        # None: all positions are trained.
        self._mask: list[int] | None = list(sample.loss_mask) if have and sample.loss_mask is not None else None
        self._masks_restored = bool(have) and context.masks_resumed
        # Truncated-sampling masks of the parts of the response, each with its number of tokens.
        self._truncation_masks: list[tuple[Kept | None, int]] = [(mask_of(sample), have)] if have else []
        # The engine's columns of the parts of the response, each with its number of tokens.
        self._columns: list[tuple[Mapping[str, NDArray[np.float32]], int]] = (
            [(sample.engine_columns, have)] if have else []
        )
        self._versions = list(sample.weight_versions) if have else []
        self._spans = list(sample.weight_spans) if have else []
        self._routes = routes_of(sample) if have else None
        self._spec_info = sample.spec_info if have else None
        self._turn_start, self._num_turns = self._restored_turns()
        self._ending: FinishReason | None = None
        self._is_changed = False
        self._is_models_turn = not have
        self._tool_time = 0.0
        self._session: str | None = sample.session_id or uuid4().hex

    @property
    def token_ids(self) -> list[int]:
        """The conversation so far: prompt and response ids."""
        return [*self._prompt, *self._ids]

    @property
    def response_length(self) -> int:
        """Response ids so far."""
        return len(self._ids)

    @property
    def num_turns(self) -> int:
        """Number of finished turns of the model. After a resume, turns without text between them count as one."""
        return self._num_turns

    @property
    def remaining(self) -> int:
        """Tokens that the response may still grow by, given ``max_response_len`` and the context length."""
        return max(0, min(self._response_room, self._context_room))

    @property
    def is_full(self) -> bool:
        """Return whether the response may not grow."""
        return self.remaining == 0

    @property
    def text(self) -> str:
        """The response so far, without special tokens."""
        return self._context.encoder.decode(self._ids)

    async def generate(self, sampling: SamplingParams) -> Turn:
        """Generate the model's next turn, or resume the aborted turn; return the whole turn.

        ``sampling.max_new_tokens`` limits the turn, :attr:`remaining` the response. The first request of a response is
        not shortened to the context length: the engine refuses a prompt that is too long for it. If the response is
        full, the turn ends with ``length`` without a request.

        Raises:
            Interrupted: the turn was aborted.
            EngineError: no engine answered, or the engine refused the request.
            DataError: the images of the prompt cannot be read.
        """
        limited = self._limited(sampling)
        if limited is None:
            turn = self._end_turn("length")
            self._ending = "length" if self._ids else None
            return turn
        await self.read_inputs()
        (answer,) = await self._context.client.generate(
            self._sent(), sampling=limited, session=self._session, **engine_inputs(self._sample)
        )
        reason = self._take(answer, sampling)
        if reason == "abort":
            raise Interrupted(f"{_who(self._sample)}: the engine aborted a turn", self.finish())
        return self._end_turn(reason)

    def append_text(self, text: str) -> None:
        """Add text that the model did not write, such as a tool's answer: mask 0, log-probability 0.0.

        The text is encoded unchanged, without the chat template. Its tokens count against the budget: those beyond
        :attr:`remaining` are dropped, and the response is truncated.
        """
        ids = self._context.encoder.encode_text(text)
        self.append_ids(ids, [0] * len(ids))

    def append_message(self, *messages: Mapping[str, JsonValue]) -> None:
        """Add messages of the user or of tools, rendered by the chat template; mask 0, log-probability 0.0.

        Example: ``trajectory.append_message({"role": "tool", "content": "72"})``. Add messages that belong together,
        such as the answers of two tools, with one call: the messages end the model's turn and open its next turn.
        Earlier turns stay as they were sampled, even if the template would render them differently (without their
        reasoning). Tokens beyond :attr:`remaining` are dropped, and the response is truncated.

        Raises:
            ValueError: the model's next turn is open already.
            DataError: the run applies no chat template, or the template refuses the messages.
        """
        if self._is_models_turn:
            raise ValueError("messages follow a turn of the model; add those that come together by one call")
        ids = self._context.encoder.encode_messages(
            messages, after=self._ids[-1] if self._ids else None, tools=tools_of(self._sample.metadata)
        )
        self.append_ids(ids, [0] * len(ids))
        self._is_models_turn = True

    def extend_to(self, prompt_ids: Sequence[int]) -> None:
        """Append the new part of ``prompt_ids``, the whole prompt of an external agent's next request, with mask 0.

        Arguments:
            prompt_ids: must start with :attr:`token_ids`.

        Raises:
            BranchError: ``prompt_ids`` does not; the trajectory is unchanged.
        """
        have = self.token_ids
        if list(prompt_ids[: len(have)]) != have:
            pairs = enumerate(zip(have, prompt_ids, strict=False))
            position = next((at for at, (before, after) in pairs if before != after), len(prompt_ids))
            raise BranchError(
                f"{_who(self._sample)}: the prompt of {len(prompt_ids)} ids differs at {position} from the "
                f"conversation of {len(have)} ids that it continues",
                position,
            )
        ids = prompt_ids[len(have) :]
        self.append_ids(ids, [0] * len(ids))
        self._is_models_turn = True

    def fork(self, at: int | None = None) -> Trajectory:
        """Return a second trajectory that continues the response so far, for a sibling of the sample.

        The shared tokens are trained in this trajectory and have mask 0 in the fork. Both samples get one
        ``rollout_id``, so that they count once in the loss and among the rewards of the group; a generate function
        returns both. Its traits must not say ``resumes``, because an aborted function passes on only one sample.

        Arguments:
            at: number of response ids to share, by default all.
        """
        sample = self._sample
        if sample.rollout_id is None:
            sample.rollout_id = sample.index or 0
        at = len(self._ids) if at is None else at
        other = copy(self)
        other._sample = replace(sample, metadata=deepcopy(sample.metadata), non_generation_time=0.0)
        other._ids, other._log_probs, other._mask = self._ids[:at], [0.0] * at, [0] * at
        other._truncation_masks, other._columns = [(None, at)], [({}, at)]
        other._spans = [(name, start, min(end, at)) for name, start, end in self._spans if start < at]
        other._versions = list(dict.fromkeys(name for name, _, _ in other._spans)) or list(self._versions)
        other._routes = None if self._routes is None or not at else self._routes[: len(self._prompt) + at - 1]
        other._turn_start, other._num_turns = at, sum(start < at for start, _ in self._turns())
        other._ending, other._is_changed = None, True
        other._is_models_turn = self._is_models_turn if at == len(self._ids) else not at
        other._masks_restored, other._tool_time = False, 0.0
        return other

    @asynccontextmanager
    async def tool_time(self, limit_s: float | None = None) -> AsyncIterator[None]:
        """Measure the block, such as a tool call, and add its time to ``Sample.non_generation_time``.

        Example: ``async with trajectory.tool_time(30): answer = await search(query)``.

        Arguments:
            limit_s: seconds after which the block is cancelled. None means no limit.

        Raises:
            TimeoutError: ``limit_s`` passed.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                yield
        finally:
            self._tool_time += time.monotonic() - started

    def append_ids(self, ids: Sequence[int], mask: Sequence[int]) -> None:
        """Add tokens that no engine sampled, with log-probability 0.0.

        Arguments:
            ids: token ids; those beyond :attr:`remaining` are dropped, and the response is truncated.
            mask: one entry per id: 1 for trained ids (as in supervised fine-tuning), 0 for others.

        Raises:
            ValueError: ids and mask differ in length.
        """
        if len(ids) != len(mask):
            raise ValueError(f"{len(ids)} ids with a mask of {len(mask)} entries; give one 0 or 1 for each id")
        room = self.remaining
        added = list(ids[:room])
        self._extend(added, [0.0] * len(added), list(mask[:room]))
        self._truncation_masks.append((None, len(added)))
        self._columns.append(({}, len(added)))
        self._turn_start = len(self._ids)
        if len(ids) > room or (self.is_full and not all(mask)):
            self._ending = "length"

    async def read_inputs(self) -> None:
        """Process the prompt and its images for the trained model; :meth:`generate` calls it.

        Raises:
            DataError: the images cannot be read, or the processor refuses them.
        """
        sample, processor = self._sample, self._context.processor
        inputs = sample.multimodal_inputs
        if self._ids or self._processed is not None or processor is None or self._context.evaluation:
            return
        if isinstance(inputs, dict) and inputs:
            try:
                self._use(await processor(sample.prompt, inputs, tools=tools_of(sample.metadata)))
            except DataError as problem:
                raise DataError(f"{_who(sample)}: {problem}") from problem

    def finish(self) -> Sample:
        """Write this response and its status into the sample; return the sample.

        ``COMPLETED``: an end token or stop text ended the last turn. ``TRUNCATED``: a budget ended the last turn, or
        added text fills the response. ``ABORTED``: the last turn was aborted. ``FAILED``: there is no response.
        """
        sample = self._sample
        sample.non_generation_time += self._tool_time
        self._tool_time = 0.0
        if self._is_changed:
            self._record()
        if self._ids or self._ending is not None:
            sample.status = FINISHED[self._ending or "stop"]
        else:
            sample.status = Status.FAILED
            sample.failure_cause = NO_ROOM if self.is_full else NOT_GENERATED
            room = f"{len(self._prompt)} prompt tokens leave no room in a context of {self._context.context_length}"
            nothing = "the generate function finished it without a token"
            sample.error = f"{_who(sample)}: {room if self.is_full else nothing}"
        return sample

    def finish_turns(self) -> list[Sample]:
        """Return one sample per turn of the model, so that each may have a separate reward. Without a turn, return the
        sample of :meth:`finish`.

        Each sample has the conversation up to the end of its turn, and only this turn is trained. The samples share one
        ``rollout_id``, so they count once in the loss and among the rewards of the group. Training reads the earlier
        tokens again for each sample: n equal turns cost (n + 1) / 2 times as much as one sample of all turns.
        """
        sample = self.finish()
        mask = self._mask or [1] * len(self._ids)
        turns = [(start, end) for start, end in self._turns() if any(mask[start:end])]
        return [self._sample_of_turn(start, end, is_last=(start, end) == turns[-1]) for start, end in turns] or [sample]

    def _sample_of_turn(self, start: int, end: int, *, is_last: bool) -> Sample:
        other = self.fork(end)
        other._log_probs[start:] = self._log_probs[start:end]
        other._mask = [*[0] * start, *(self._mask or [1] * end)[start:end]]
        mask = joined(self._truncation_masks)
        other._truncation_masks = [(mask if mask is None else mask.until(end), end)]
        columns = joined_columns(self._columns)
        other._columns = [({}, start), ({name: column[start:end] for name, column in columns.items()}, end - start)]
        other._ending = self._ending if is_last else "stop"
        other._tool_time = self._sample.non_generation_time if is_last else 0.0
        other._spec_info = self._spec_info if is_last else None
        return other.finish()

    @property
    def _response_room(self) -> int:
        limit = self._context.max_response_len
        return sys.maxsize if limit is None else limit - len(self._ids)

    @property
    def _context_room(self) -> int:
        limit = self._context.context_length
        return sys.maxsize if limit is None else limit - len(self._prompt) - len(self._ids)

    def _limited(self, sampling: SamplingParams) -> SamplingParams | None:
        """Return ``sampling`` for the remaining turn, or None if the response is full."""
        have = len(self._ids) - self._turn_start
        room = min(sampling.max_new_tokens - have, self._response_room)
        if self._ids:
            room = min(room, self._context_room)
        if room < 1:
            return None
        fewest = min(room, max(0, sampling.min_new_tokens - have))
        return replace(sampling, max_new_tokens=room, min_new_tokens=fewest)

    def _sent(self) -> list[int]:
        return [*self._sent_prompt, *self._ids]

    def _use(self, processed: ProcessedPrompt | None) -> None:
        if processed is not None:
            self._processed, self._prompt = processed, processed.ids

    def _take(self, answer: Generation, sampling: SamplingParams) -> FinishReason:
        """Append an engine's answer; return its finish reason."""
        read = answer.prompt_tokens
        if self._processed is not None and not self._ids and read not in (None, len(self._prompt)):
            raise RunError(
                f"sample {self._sample.index}: the engine read {read} prompt tokens, and the checkpoint's processor "
                f"makes {len(self._prompt)} of the same prompt and images; log-probabilities would be of other places. "
                "Give every image one placeholder in the prompt, as the model's chat template writes it"
            )
        answer = until_stop(self._ids[self._turn_start :], answer, sampling, self._context.encoder)
        have, more = len(self._ids), list(answer.token_ids)
        if self._masks_restored:
            self._mask, self._masks_restored = [0] * have, False
        if more or not have:
            self._versions = list(dict.fromkeys([*self._versions, *answer.weight_versions]))
            self._spans += [(name, have + start, have + end) for name, start, end in answer.weight_spans]
        self._extend(more, list(answer.log_probs), [1] * len(more))
        self._truncation_masks.append((answer.kept, len(more)))
        self._columns.append((answer.columns, len(more)))
        self._routes = join_routes(self._routes, answer.routed_experts)
        self._spec_info = added(self._spec_info, answer.spec_info)
        self._ending = answer.finish_reason
        return answer.finish_reason

    def _extend(self, ids: list[int], log_probs: list[float], mask: list[int]) -> None:
        if self._mask is None and not all(mask):
            self._mask = [1] * len(self._ids)
        if self._mask is not None:
            self._mask += mask
        self._ids += ids
        self._log_probs += log_probs
        self._is_changed = True

    def _end_turn(self, reason: FinishReason) -> Turn:
        start = self._turn_start
        ids, log_probs = self._ids[start:], self._log_probs[start:]
        self._ending = reason
        self._num_turns += bool(ids)
        self._is_models_turn = False
        self._turn_start = len(self._ids)
        return Turn(self._context.encoder.decode(ids), ids, log_probs, reason)

    def _restored_turns(self) -> tuple[int, int]:
        """Return the start of the aborted turn in the response, and the number of finished turns."""
        turns = self._turns()
        is_in_turn = bool(turns) and turns[-1][1] == len(self._ids)
        return (turns[-1][0], len(turns) - 1) if is_in_turn else (len(self._ids), len(turns))

    def _turns(self) -> list[tuple[int, int]]:
        """Return the start and end of each turn of the model in the response."""
        sampled = [False] * len(self._ids)
        for _, start, end in self._spans:
            sampled[start:end] = [True] * (end - start)
        if not self._spans:  # not recorded: untrained tokens with log-probability 0 are added text
            mask = self._mask or [1] * len(self._ids)
            sampled = [bool(mask[at]) or log_prob != 0 for at, log_prob in enumerate(self._log_probs)]
        edges = [at for at, (before, after) in enumerate(pairwise([False, *sampled, False])) if before != after]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _record(self) -> None:
        sample = self._sample
        sample.tokens = TokenIds([*self._prompt, *self._ids])
        sample.response, sample.response_length = self.text, len(self._ids)
        sample.rollout_log_probs = LogProbs(self._log_probs)
        if self._mask is not None:
            sample.loss_mask = Mask(self._mask)
        sample.weight_versions, sample.weight_spans = list(self._versions), list(self._spans)
        sample.rollout_routed_experts = pad_routes(self._routes, len(sample.tokens) - 1)
        sample.spec_info = self._spec_info or SpecInfo()
        keep(sample, joined(self._truncation_masks))
        sample.engine_columns = joined_columns(self._columns)
        if self._processed is not None:
            sample.multimodal_train_inputs = dict(self._processed.inputs)


def _who(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"
