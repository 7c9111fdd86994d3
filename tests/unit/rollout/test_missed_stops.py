"""Responses that contain their stop although the interrupted engine reported an abort."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_core import RunView
from slime_core.builtin.rollout import SingleTurn
from slime_core.generation import GenerateContext, Generation, Kept, SamplingParams
from slime_core.generation.sampling import until_stop
from slime_core.rollout.engines.client import GenerateClient
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine


class Bytes:
    """A token is a byte of the text."""

    def decode_all(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


BYTES: Any = Bytes()
STOP = SamplingParams(stop=("STOP",), stop_token_ids=(10,))


def answer(text: str, reason: Any = "length") -> Generation:
    ids = array("i", list(text.encode()))
    return Generation(ids, array("f", list(range(len(ids)))), reason, ("4",), text, weight_spans=(("4", 0, len(ids)),))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_text_that_was_cut_in_two_ends_the_response_where_it_is_complete(cut: int) -> None:
    before, after = "and STOP then"[: 4 + cut], "and STOP then"[4 + cut :]
    found = until_stop(before.encode(), answer(after), STOP, BYTES)
    assert bytes(list(found.token_ids)) == "STOP"[cut:].encode()
    assert (found.finish_reason, list(found.log_probs)) == ("stop", list(range(4 - cut)))
    assert found.weight_spans == (("4", 0, 4 - cut),)


def test_everything_about_the_tokens_after_the_stop_is_cut() -> None:
    kept = Kept(array("i", [1, 2, 3, 4, 5]), array("i", [0, 2, 3, 5]))
    spans, routes = (("4", 0, 2), ("5", 2, 3)), np.arange(9).reshape(9, 1, 1).astype(np.int16)
    given = replace(answer("OP!"), kept=kept, weight_spans=spans, weight_versions=("4", "5"), routed_experts=routes)
    found = until_stop(b"ST", given, STOP, BYTES)
    assert (found.weight_versions, found.weight_spans, found.text) == (("4",), (("4", 0, 2),), "")
    assert found.kept is not None
    assert (list(found.kept.token_ids), list(found.kept.offsets)) == ([1, 2, 3], [0, 2, 3])
    assert found.routed_experts is not None
    assert found.routed_experts.ravel().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("ST", "O then STOP", "stop"),  # the engine has seen this one itself
        ("ST", " OP", "length"),
        ("", "then STO", "length"),
        ("ST", "", "abort"),
    ],
)
def test_a_finish_reason_of_the_engine_is_kept(before: str, after: str, reason: str) -> None:
    given = answer(after, reason)
    assert until_stop(before.encode(), given, STOP, BYTES) is given


def test_a_stop_text_whose_characters_are_cut_in_two_is_found() -> None:
    euro, given = "€!".encode(), answer("")
    rest = replace(given, token_ids=array("i", [*euro[2:], 33]), log_probs=array("f", [0] * 3))
    found = until_stop(euro[:2], rest, SamplingParams(stop=("€!",)), BYTES)
    assert bytes([*euro[:2], *found.token_ids]) == euro


@pytest.mark.parametrize("text", ["ab\n", "abSTOP", "ab\ncd", "abSTOPcd"])
def test_an_aborted_response_whose_last_tokens_end_it_is_whole(text: str) -> None:
    found = until_stop(b"", answer(text, "abort"), STOP, BYTES)
    assert (found.finish_reason, bytes(list(found.token_ids))) == ("stop", text.removesuffix("cd").encode())


def test_with_ignore_eos_an_end_token_does_not_end_an_aborted_response() -> None:
    given = answer("ab\n", "abort")
    assert until_stop(b"", given, replace(STOP, ignore_eos=True), BYTES) is given


def test_a_stop_text_in_extra_goes_before_the_other() -> None:
    sampling = replace(STOP, extra={"stop": "!!"})
    assert bytes(list(until_stop(b"a!", answer("!b"), sampling, BYTES).token_ids)) == b"!"
    given = answer("OPb")
    assert until_stop(b"ST", given, sampling, BYTES) is given


DIGITS = SamplingParams(extra={"stop_regex": r"= \d+;"})


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_pattern_that_was_cut_in_two_ends_the_response_where_it_is_complete(cut: int) -> None:
    before, after = "x = 12; y"[: 2 + cut], "x = 12; y"[2 + cut :]
    found = until_stop(before.encode(), answer(after), DIGITS, BYTES)
    assert before.encode() + bytes(list(found.token_ids)) == b"x = 12;"
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("pattern", "before", "after", "whole"),
    [
        (["no", r"\d;"], "a 1", "; b", "a 1;"),  # one of several
        (r"1$", "a", "1 b", "a1"),  # where it stood at the end
        (r"a.*b", "a" + "x" * 200, "xb.", "a" + "x" * 201 + "b"),  # of any length
        (r"a.*b", "a" + "x" * 300, "xb.", "a" + "x" * 301 + "b."),  # beyond the bound
    ],
)
def test_a_pattern_is_looked_for_as_the_engine_does_within_a_bound(
    pattern: Any, before: str, after: str, whole: str
) -> None:
    found = until_stop(before.encode(), answer(after), SamplingParams(extra={"stop_regex": pattern}), BYTES)
    assert before + bytes(list(found.token_ids)).decode() == whole


def test_an_aborted_response_whose_last_tokens_match_a_pattern_is_whole() -> None:
    found = until_stop(b"", answer("x = 12; y", "abort"), DIGITS, BYTES)
    assert (found.finish_reason, bytes(list(found.token_ids))) == ("stop", b"x = 12;")


# --- On an engine -----------------------------------------------------------------------------------------------------


class Encoder:
    def encode(self, prompt: Any, *, tools: Any = None) -> list[int]:
        return [3, 8, 4]

    def decode(self, ids: Any) -> str:
        return FakeEngine.text(ids)

    decode_all = decode


async def _response(engine: FakeEngine, sampling: SamplingParams, *, interrupted_after: int | None = None) -> Sample:
    nothing: Any = Encoder()
    async with GenerateClient(engine.url, timeout_s=120) as client:
        context = GenerateContext(client, nothing)
        (sample,) = samples = [Sample(prompt="q")]
        if interrupted_after is not None:
            engine.partial, engine.delay_s = interrupted_after, 60.0
            asking = asyncio.create_task(SingleTurn(None, RunView())(context, samples, sampling))
            while not engine.bodies:
                await asyncio.sleep(0)
            async with client.aborting():
                await asking
            engine.delay_s = 0.0
        if sample.status is not Status.COMPLETED:
            await SingleTurn(None, RunView())(context, samples, sampling)
        return sample


@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("by", ["text", "pattern", "id"])
async def test_wherever_it_is_interrupted_a_response_ends_in_the_same_place(after: int, by: str) -> None:
    with FakeEngine() as engine:
        free = await _response(engine, SamplingParams(max_new_tokens=3))
        first, second, third = free.tokens[3:]
        text = FakeEngine.text([second, third])
        stops = {"text": {"stop": (text,)}, "pattern": {"extra": {"stop_regex": [re.escape(text)]}}}
        sampling = SamplingParams(max_new_tokens=9, **stops.get(by, {"stop_token_ids": (third,)}))
        whole = await _response(engine, sampling)
    assert (whole.tokens, whole.status) == ([3, 8, 4, first, second, third], Status.COMPLETED)
    with FakeEngine() as engine:
        found = await _response(engine, sampling, interrupted_after=after)
        assert len(engine.bodies) == (1 if after == 3 else 2)
    assert (found.tokens, found.response, found.status) == (whole.tokens, whole.response, Status.COMPLETED)
    assert found.rollout_log_probs == whole.rollout_log_probs
    assert found.weight_spans[-1][2] == found.response_length == 3
