"""One response of several turns: ids, masks, log-probabilities, budgets, and what an abort leaves."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from slime_core.errors import EngineError
from slime_core.generation import (
    BranchError,
    FinishReason,
    GenerateContext,
    Generation,
    Interrupted,
    Kept,
    SamplingParams,
    Trajectory,
)
from slime_core.types import LogProbs, Sample, SpecInfo, Status


class Letters:
    """A token is a character."""

    def encode(self, prompt: Any, *, tools: Any = None) -> list[int]:
        return [ord(one) for one in prompt]

    def encode_text(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def encode_messages(self, messages: Any, *, after: Any, tools: Any) -> list[int]:
        """A bar ends a turn, ``>`` opens the next one."""
        return self.encode_text("|" + ",".join(one["content"] for one in messages) + ">")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    decode_all = decode


class Engine:
    """Gives the answers in their order, and records the requests."""

    def __init__(self, *answers: Generation) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, int, int]] = []
        self.sessions: set[str | None] = set()

    async def generate(
        self, input_ids: Sequence[int], *, sampling: SamplingParams, session: str | None = None
    ) -> list[Generation]:
        self.requests.append(("".join(map(chr, input_ids)), sampling.max_new_tokens, sampling.min_new_tokens))
        self.sessions.add(session)
        if not self.answers:
            raise EngineError("no engine answered")
        return [self.answers.pop(0)]


def answer(text: str, reason: FinishReason = "stop", version: str = "1", **more: Any) -> Generation:
    ids = [ord(one) for one in text]
    spans = ((version, 0, len(ids)),)
    return Generation(array("i", ids), array("f", [-0.5] * len(ids)), reason, (version,), weight_spans=spans, **more)


def context(engine: Engine, **more: Any) -> GenerateContext:
    client: Any = engine
    encoder: Any = Letters()
    return GenerateContext(client, encoder, **more)


SAMPLING = SamplingParams(max_new_tokens=6, min_new_tokens=2)


async def calculate(given: GenerateContext, sample: Sample, sampling: SamplingParams = SAMPLING) -> Sample:
    """Answers every turn that ends with a question mark; at most three turns."""
    trajectory = given.start(sample)
    while trajectory.num_turns < 3 and not trajectory.is_full:
        turn = await trajectory.generate(sampling)
        if not turn.text.endswith("?"):
            break
        trajectory.append_text("=7;")
    return trajectory.finish()


async def test_turns_are_trained_as_the_engine_returned_them_and_added_text_is_not() -> None:
    engine = Engine(answer("3+4?"), answer("7.", version="2"))
    sample = await calculate(context(engine), Sample(prompt="q"))
    assert engine.requests == [("q", 6, 2), ("q3+4?=7;", 6, 2)]
    assert "".join(map(chr, sample.tokens)) == "q3+4?=7;7."
    assert (sample.response, sample.response_length, sample.status) == ("3+4?=7;7.", 9, Status.COMPLETED)
    assert sample.loss_mask == [1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, -0.5, -0.5]
    assert (sample.weight_versions, sample.weight_spans) == (["1", "2"], [("1", 0, 4), ("2", 7, 9)])


@pytest.mark.parametrize(
    ("limits", "answers", "lengths", "response", "mask", "status"),
    [
        ({}, [("7.", "stop")], [6], "7.", None, Status.COMPLETED),
        # All turns and added text share the budget of the response.
        (
            {"max_response_len": 8},
            [("3+4?", "stop"), ("7", "length")],
            [6, 1],
            "3+4?=7;7",
            [1] * 4 + [0] * 3 + [1],
            Status.TRUNCATED,
        ),
        ({"max_response_len": 6}, [("3+4?", "stop")], [6], "3+4?=7", [1] * 4 + [0] * 2, Status.TRUNCATED),
        ({"max_response_len": 7}, [("3+4?", "stop")], [6], "3+4?=7;", [1] * 4 + [0] * 3, Status.TRUNCATED),
        ({"max_response_len": 2}, [("7.", "stop")], [2], "7.", None, Status.COMPLETED),
        (
            {"context_length": 10},
            [("3+4?", "stop"), ("7.", "length")],
            [6, 2],
            "3+4?=7;7.",
            [1] * 4 + [0] * 3 + [1] * 2,
            Status.TRUNCATED,
        ),
    ],
)
async def test_turns_and_added_text_share_the_budgets_of_response_and_context(
    limits: dict[str, int],
    answers: list[tuple[str, FinishReason]],
    lengths: list[int],
    response: str,
    mask: list[int] | None,
    status: Status,
) -> None:
    engine = Engine(*(answer(text, reason) for text, reason in answers))
    sample = await calculate(context(engine, **limits), Sample(prompt="q"))
    assert [request[1] for request in engine.requests] == lengths
    assert (sample.response, sample.loss_mask, sample.status) == (response, mask, status)
    assert len(engine.sessions) == 1


async def test_the_remaining_budget_is_the_smaller_of_both() -> None:
    given = context(Engine(answer("abc")), max_response_len=20, context_length=10)
    trajectory = given.start(Sample(prompt="qq"))
    assert (trajectory.remaining, trajectory.is_full) == (8, False)
    await trajectory.generate(SAMPLING)
    assert (trajectory.remaining, trajectory.text, trajectory.num_turns) == (5, "abc", 1)
    trajectory.append_text("12345")
    assert (trajectory.remaining, trajectory.is_full) == (0, True)


async def test_without_room_a_turn_is_empty_and_no_request_is_sent() -> None:
    engine = Engine(answer("abcd"))
    trajectory = context(engine, max_response_len=4).start(Sample(prompt="q"))
    await trajectory.generate(SAMPLING)
    turn = await trajectory.generate(SAMPLING)
    assert (turn.text, turn.token_ids, turn.finish_reason, len(engine.requests)) == ("", [], "length", 1)
    assert (trajectory.num_turns, trajectory.finish().status) == (1, Status.TRUNCATED)


async def test_a_prompt_that_leaves_no_room_or_a_response_without_a_token_has_failed() -> None:
    sample = await calculate(context(Engine(), context_length=3), Sample(prompt="qqq", index=5, group_index=2))
    assert (sample.status, sample.failure_cause) == (Status.FAILED, "too_long")
    sample = context(Engine()).start(Sample(prompt="q", index=5, group_index=2)).finish()
    assert (sample.status, sample.failure_cause) == (Status.FAILED, "not_generated")


async def test_a_sample_stays_as_it_is_until_its_response_is_finished() -> None:
    sample = Sample(prompt="q", session_id="mine")
    engine = Engine(answer("a?"))
    trajectory = context(engine).start(sample)
    await trajectory.generate(SAMPLING)
    trajectory.append_text("d")
    with pytest.raises(EngineError, match="no engine"):
        await trajectory.generate(SAMPLING)
    assert sample == Sample(prompt="q", session_id="mine")
    assert trajectory.finish() is sample
    assert (sample.response, engine.sessions) == ("a?d", {"mine"})


async def aborted(*answers: Generation, **more: Any) -> Sample:
    sample = Sample(prompt="q", index=1, group_index=0)
    with pytest.raises(Interrupted, match="sample 1 of group 0: ") as stop:
        await calculate(context(Engine(*answers), **more), sample)
    assert stop.value.sample is sample
    return sample


async def test_an_aborted_turn_leaves_the_tokens_so_far_and_continues_from_them() -> None:
    sample = await aborted(answer("3+4?"), answer("7 o", "abort"))
    assert (sample.response, sample.status) == ("3+4?=7;7 o", Status.ABORTED)
    engine = Engine(answer("r?", version="2"), answer("8", version="2"))
    sample = await calculate(context(engine), sample)
    # The rest of the turn, its budget and the fewest tokens less what it has; then the third turn.
    assert engine.requests == [("q3+4?=7;7 o", 3, 0), ("q3+4?=7;7 or?=7;", 6, 2)]
    assert (sample.response, sample.status) == ("3+4?=7;7 or?=7;8", Status.COMPLETED)
    assert sample.loss_mask == [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    assert sample.weight_spans == [("1", 0, 4), ("1", 7, 10), ("2", 10, 12), ("2", 15, 16)]
    assert sample.weight_versions == ["1", "2"]


async def test_an_abort_between_turns_continues_with_the_next_one() -> None:
    sample = await aborted(answer("3+4?"), answer("", "abort"))
    assert (sample.response, sample.loss_mask, sample.weight_versions) == ("3+4?=7;", [1] * 4 + [0] * 3, ["1"])
    engine = Engine(answer("7.", version="2"))
    sample = await calculate(context(engine), sample)
    assert (engine.requests, sample.response) == ([("q3+4?=7;", 6, 2)], "3+4?=7;7.")


async def test_tokens_before_a_resume_are_not_trained_where_the_run_says_so() -> None:
    sample = await aborted(answer("a?"), answer("b", "abort"))
    sample = await calculate(context(Engine(answer("c?"), answer("d")), masks_resumed=True), sample)
    assert sample.response == "a?=7;bc?=7;d"
    assert sample.loss_mask == [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5, -0.5, 0, 0, 0, -0.5]


async def test_a_turn_that_is_continued_is_returned_whole_also_without_recorded_versions() -> None:
    sample = await aborted(answer("3+4?"), answer("7 o", "abort"))
    sample.weight_spans = []
    trajectory = context(Engine(answer("r 8", "length"))).start(sample)
    assert trajectory.num_turns == 1
    turn = await trajectory.generate(SAMPLING)
    assert (turn.text, len(turn.token_ids), turn.finish_reason, trajectory.num_turns) == ("7 or 8", 6, "length", 2)


async def test_counters_and_kept_tokens_of_all_turns_are_added_up() -> None:
    kept = Kept(array("i", [97, 98, 63]), array("i", [0, 2, 3]))
    first = answer("a?", kept=kept, spec_info=SpecInfo(1, 2, 3, 4))
    second = answer("b", kept=Kept(array("i", [98]), array("i", [0, 1])), spec_info=SpecInfo(10, 20, 30, 40))
    sample = await calculate(context(Engine(first, second)), Sample(prompt="q"))
    assert sample.spec_info == SpecInfo(11, 22, 33, 44)
    assert sample.rollout_top_p_token_ids == [97, 98, 63, 98]
    assert sample.rollout_top_p_token_offsets == [0, 2, 3, 3, 3, 3, 4]


def routes(number: int, length: int) -> np.ndarray:
    return np.full((length, 1, 1), number, np.int16)


@pytest.mark.parametrize(
    ("answers", "limit", "expected"),
    [
        # The engine reads all tokens but the last: 2 in the first turn, 6 in the second, text in between included.
        ([answer("a?", routed_experts=routes(1, 2)), answer("b", routed_experts=routes(2, 6))], None, [1, 1] + [2] * 4),
        ([answer("a?", routed_experts=routes(1, 2))], 5, [1, 1, -1, -1, -1]),
    ],
)
async def test_tokens_keep_the_experts_of_the_turn_that_read_them(
    answers: list[Generation], limit: int | None, expected: list[int]
) -> None:
    sample = await calculate(context(Engine(*answers), max_response_len=limit), Sample(prompt="q"))
    assert len(sample.tokens) - 1 == len(expected)
    assert sample.rollout_routed_experts.ravel().tolist() == expected


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def test_a_message_ends_the_turn_and_opens_the_next_one() -> None:
    trajectory = context(Engine(answer("3+4?"), answer("7."))).start(Sample(prompt="q"))
    await trajectory.generate(SAMPLING)
    trajectory.append_message(user("12"), user("3"))
    await trajectory.generate(SAMPLING)
    sample = trajectory.finish()
    assert sample.response == "3+4?|12,3>7."
    assert sample.loss_mask == [1] * 4 + [0] * 6 + [1] * 2
    assert sample.rollout_log_probs == LogProbs([-0.5] * 4 + [0.0] * 6 + [-0.5] * 2)


async def test_a_message_follows_a_turn_of_the_model() -> None:
    trajectory = context(Engine(answer("3+4?"))).start(Sample(prompt="q"))
    with pytest.raises(ValueError, match="messages"):
        trajectory.append_message(user("12"))
    await trajectory.generate(SAMPLING)
    trajectory.append_message(user("12"))
    with pytest.raises(ValueError, match="one call"):
        trajectory.append_message(user("3"))


async def test_a_whole_prompt_extends_the_conversation_that_it_starts_with() -> None:
    trajectory = context(Engine(answer("ab"), answer("c"))).start(Sample(prompt="q", index=2, group_index=1))
    await trajectory.generate(SAMPLING)
    trajectory.extend_to([ord(one) for one in "qab!?"])
    await trajectory.generate(SAMPLING)
    with pytest.raises(BranchError, match=r"sample 2 of group 1: .* 5 .* 2") as refused:
        trajectory.extend_to([ord(one) for one in "qaX!?"])
    assert refused.value.position == 2
    with pytest.raises(BranchError) as refused:
        trajectory.extend_to([ord("q")])
    assert refused.value.position == 1
    sample = trajectory.finish()
    assert (sample.response, sample.loss_mask) == ("ab!?c", [1, 1, 0, 0, 1])


async def test_the_tokens_that_a_fork_shares_are_trained_once() -> None:
    engine = Engine(answer("3+4?"), answer("7."), answer("8.", version="2"))
    trajectory = context(engine).start(Sample(prompt="q", index=5, metadata={"a": [1]}))
    await trajectory.generate(SAMPLING)
    trajectory.append_text("=")
    other = trajectory.fork()
    await trajectory.generate(SAMPLING)
    await other.generate(SAMPLING)
    first, second = trajectory.finish(), other.finish()
    assert [request[0] for request in engine.requests] == ["q", "q3+4?=", "q3+4?="]
    assert (first.response, first.loss_mask) == ("3+4?=7.", [1, 1, 1, 1, 0, 1, 1])
    assert (second.response, second.loss_mask) == ("3+4?=8.", [0, 0, 0, 0, 0, 1, 1])
    assert second.rollout_log_probs == LogProbs([0.0] * 5 + [-0.5] * 2)
    assert (second.weight_spans, second.weight_versions) == ([("1", 0, 4), ("2", 5, 7)], ["1", "2"])
    assert (first.rollout_id, second.rollout_id, first.index, second.index) == (5, 5, 5, 5)
    assert second.metadata == first.metadata
    assert second.metadata["a"] is not first.metadata["a"]


@pytest.mark.parametrize(("at", "turns", "left"), [(0, 0, "q"), (4, 1, "q3+4?"), (6, 2, "q3+4?=7")])
async def test_a_fork_shares_as_much_as_it_is_given(at: int, turns: int, left: str) -> None:
    engine = Engine(answer("3+4?"), answer("7", "length"), answer("9"))
    trajectory = context(engine).start(Sample(prompt="q", index=0))
    await trajectory.generate(SAMPLING)
    trajectory.append_text("=")
    await trajectory.generate(SAMPLING)
    other = trajectory.fork(at)
    assert other.num_turns == turns
    await other.generate(SAMPLING)
    sample = other.finish()
    assert engine.requests[-1][0] == left
    assert sample.loss_mask == [0] * at + [1]
    assert sample.status is Status.COMPLETED
    assert trajectory.finish().response == "3+4?=7"


async def test_experts_and_kept_tokens_of_a_fork_are_those_of_its_tokens() -> None:
    experts, kept = np.arange(3, dtype=np.int16).reshape(3, 1, 1), Kept(array("i", [7, 8]), array("i", [0, 2, 2, 2]))
    engine = Engine(answer("abc", routed_experts=experts, kept=kept), answer("d"))
    trajectory = context(engine).start(Sample(prompt="q", index=0))
    await trajectory.generate(SAMPLING)
    other = trajectory.fork(2)
    await other.generate(SAMPLING)
    sample = other.finish()
    assert np.asarray(sample.rollout_routed_experts)[:, 0, 0].tolist() == [0, 1, -1]
    assert sample.rollout_top_p_token_ids is None


def columns(*numbers: float) -> dict[str, np.ndarray]:
    return {"entropy": np.array([[number] for number in numbers], np.float32)}


async def columns_of_two_turns() -> Trajectory:
    answers = [answer("abc", columns=columns(1, 2, 3)), answer("de", columns=columns(4, 5))]
    trajectory = context(Engine(*answers, answer("f", columns=columns(6)))).start(Sample(prompt="q", index=0))
    await trajectory.generate(SAMPLING)
    trajectory.append_text("=")
    await trajectory.generate(SAMPLING)
    return trajectory


def entropies(sample: Sample) -> list[float]:
    return sample.engine_columns["entropy"][:, 0].tolist()


async def test_columns_of_the_engine_are_0_at_tokens_that_a_fork_shares() -> None:
    trajectory = await columns_of_two_turns()
    other = trajectory.fork(2)
    await other.generate(SAMPLING)
    assert entropies(trajectory.finish()) == [1, 2, 3, 0, 4, 5]
    assert entropies(other.finish()) == [0, 0, 6]


async def test_columns_of_the_engine_are_those_of_each_turn_alone() -> None:
    first, second = (await columns_of_two_turns()).finish_turns()
    assert (entropies(first), entropies(second)) == ([1, 2, 3], [0, 0, 0, 0, 4, 5])


async def test_each_turn_alone_is_a_sample_that_trains_this_turn() -> None:
    kept = Kept(array("i", [55, 56]), array("i", [0, 2, 2]))
    engine = Engine(answer("3+4?"), answer("7.", "length", version="2", kept=kept, spec_info=SpecInfo(1, 2, 3, 4)))
    trajectory = context(engine).start(Sample(prompt="q", index=5, metadata={"a": [1]}, non_generation_time=1.0))
    await trajectory.generate(SAMPLING)
    trajectory.append_text("=")
    await trajectory.generate(SAMPLING)
    first, second = trajectory.finish_turns()
    assert (first.response, first.loss_mask, first.weight_versions) == ("3+4?", [1, 1, 1, 1], ["1"])
    assert (second.response, second.loss_mask, second.weight_versions) == ("3+4?=7.", [0] * 5 + [1, 1], ["1", "2"])
    assert first.rollout_log_probs == LogProbs([-0.5] * 4)
    assert second.rollout_log_probs == LogProbs([0.0] * 5 + [-0.5] * 2)
    assert (first.rollout_top_p_token_offsets, second.rollout_top_p_token_offsets) == ([0] * 5, [0] * 6 + [2, 2])
    assert (first.status, second.status) == (Status.COMPLETED, Status.TRUNCATED)
    assert [(one.index, one.rollout_id, one.non_generation_time) for one in (first, second)] == [
        (5, 5, 0.0),
        (5, 5, 1.0),
    ]
    assert (first.spec_info, second.spec_info) == (SpecInfo(), SpecInfo(1, 2, 3, 4))
    assert first.metadata is not second.metadata


async def test_the_time_of_a_tool_is_measured_and_limited() -> None:
    sample = Sample(prompt="q", non_generation_time=1.0)
    trajectory = context(Engine(answer("ab"))).start(sample)
    await trajectory.generate(SAMPLING)
    async with trajectory.tool_time():
        await asyncio.sleep(0.02)
    with pytest.raises(TimeoutError):
        async with trajectory.tool_time(0.02):
            await asyncio.sleep(60)
    assert sample.non_generation_time == 1.0
    assert trajectory.finish().non_generation_time >= 1.04
    assert trajectory.finish() is sample
    assert sample.non_generation_time < 60
