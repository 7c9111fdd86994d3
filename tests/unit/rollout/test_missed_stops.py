"""Interrupted responses: what ends them where, and how they resume."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_core.builtin.rollout import SingleTurn
from slime_core.errors import RequestFailed
from slime_core.generation import GenerateContext, Generation, Kept, SamplingParams
from slime_core.generation.sampling import until_stop
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.group_generator import prepare_group
from slime_core.rollout.routing import RoutedComponent
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds
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


IN_EXTRA = replace(STOP, extra={"stop": "!!"})
DIGITS = SamplingParams(extra={"stop_regex": r"= \d+;"})


def pattern(*patterns: str) -> SamplingParams:
    return SamplingParams(extra={"stop_regex": list(patterns)})


@pytest.mark.parametrize(
    ("sampling", "before", "after", "reason", "whole"),
    [
        *((STOP, "and STOP then"[:cut], "and STOP then"[cut:], "length", "and STOP") for cut in (5, 6, 7)),
        *((DIGITS, "x = 12; y"[:cut], "x = 12; y"[cut:], "length", "x = 12;") for cut in (3, 4, 5, 6)),
        *((STOP, "", text, "abort", text.removesuffix("cd")) for text in ("ab\n", "abSTOP", "ab\ncd", "abSTOPcd")),
        (DIGITS, "", "x = 12; y", "abort", "x = 12;"),
        (IN_EXTRA, "a!", "!b", "length", "a!!"),
        (pattern("no", r"\d;"), "a 1", "; b", "length", "a 1;"),
        (pattern(r"1$"), "a", "1 b", "length", "a1"),  # where it stood at the end
        (pattern(r"a.*b"), "a" + "x" * 200, "xb.", "length", "a" + "x" * 201 + "b"),  # of any length, within a bound
    ],
)
def test_a_response_ends_where_its_stop_is_complete(
    sampling: SamplingParams, before: str, after: str, reason: str, whole: str
) -> None:
    stopped = until_stop(before.encode(), answer(after, reason), sampling, BYTES)
    assert before.encode() + bytes(list(stopped.token_ids)) == whole.encode()
    count = len(stopped.token_ids)
    assert (stopped.finish_reason, list(stopped.log_probs)) == ("stop", list(range(count)))
    assert stopped.weight_spans == (("4", 0, count),)


@pytest.mark.parametrize(
    ("sampling", "before", "after", "reason"),
    [
        (STOP, "ST", "O then STOP", "stop"),  # the engine has seen this one itself
        (STOP, "ST", " OP", "length"),
        (STOP, "", "then STO", "length"),
        (STOP, "ST", "", "abort"),
        (replace(STOP, ignore_eos=True), "", "ab\n", "abort"),
        (IN_EXTRA, "ST", "OPb", "length"),
        (pattern(r"a.*b"), "a" + "x" * 300, "xb.", "length"),  # beyond the bound
    ],
)
def test_an_answer_without_a_missed_stop_is_kept(
    sampling: SamplingParams, before: str, after: str, reason: str
) -> None:
    given = answer(after, reason)
    assert until_stop(before.encode(), given, sampling, BYTES) is given


def test_a_stop_text_whose_characters_are_cut_in_two_is_found() -> None:
    euro, given = "€!".encode(), answer("")
    rest = replace(given, token_ids=array("i", [*euro[2:], 33]), log_probs=array("f", [0] * 3))
    stopped = until_stop(euro[:2], rest, SamplingParams(stop=("€!",)), BYTES)
    assert bytes([*euro[:2], *stopped.token_ids]) == euro


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
            asking = asyncio.create_task(SingleTurn()(context, samples, sampling))
            while not engine.bodies:
                await asyncio.sleep(0)
            async with client.aborting():
                await asking
            engine.delay_s = 0.0
        if sample.status is not Status.COMPLETED:
            await SingleTurn()(context, samples, sampling)
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


class Letters:
    def encode(self, prompt: Any, *, tools: Any = None) -> list[int]:
        return [ord(one) for one in prompt]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


class Client:
    """Gives the answers in their order, and records the requests."""

    def __init__(self, *answers: list[Generation]) -> None:
        self.answers, self.requests = list(answers), []

    async def generate(
        self, ids: list[int], *, sampling: SamplingParams, n: int = 1, session: None = None
    ) -> list[Generation]:
        self.requests.append(("".join(map(chr, ids)), sampling.max_new_tokens, n))
        return self.answers.pop(0)


def sampled(text: str, reason: Any, version: str, log_prob: float = -0.5) -> Generation:
    ids = [ord(one) for one in text]
    spans = ((version, 0, len(ids)),) if ids else ()
    return Generation(array("i", ids), array("f", [log_prob] * len(ids)), reason, (version,), weight_spans=spans)


def ended(response: str = "ab", **values: Any) -> Sample:
    tokens = TokenIds([ord(one) for one in f"q{response}"])
    sample = Sample(group_index=3, index=6, prompt="q", tokens=tokens, response=response, status=Status.ABORTED)
    sample.response_length, sample.rollout_log_probs = len(response), LogProbs([-1.0] * len(response))
    sample.weight_versions, sample.weight_spans = ["1"], [("1", 0, len(response))]
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


LONG = SamplingParams(max_new_tokens=5, min_new_tokens=3)


async def resumed(*samples: Sample, client: Client, masks: bool = False) -> list[Sample]:
    context: Any = GenerateContext(client, Letters(), masks_resumed=masks)
    return await SingleTurn()(context, list(samples), LONG)


async def test_an_aborted_response_resumes_from_its_tokens() -> None:
    client = Client([sampled("cd", "stop", "2")])
    (sample,) = await resumed(ended(), client=client)
    assert client.requests == [("qab", 3, 1)]
    assert (sample.response, sample.response_length, sample.status) == ("abcd", 4, Status.COMPLETED)
    assert sample.tokens == [ord(one) for one in "qabcd"]
    assert list(sample.rollout_log_probs or ()) == [-1.0, -1.0, -0.5, -0.5]
    assert sample.weight_versions == ["1", "2"]
    assert sample.weight_spans == [("1", 0, 2), ("2", 2, 4)]
    assert sample.loss_mask is None


async def test_only_what_was_added_is_trained_where_the_run_says_so() -> None:
    (sample,) = await resumed(ended(), client=Client([sampled("c", "abort", "2")]), masks=True)
    assert (sample.loss_mask, sample.status) == ([0, 0, 1], Status.ABORTED)
    (sample,) = await resumed(sample, client=Client([sampled("d", "stop", "3")]), masks=True)
    assert (sample.loss_mask, sample.weight_versions) == ([0, 0, 0, 1], ["1", "2", "3"])
    (sample,) = await resumed(ended(loss_mask=Mask([1, 0])), client=Client([sampled("c", "stop", "2")]))
    assert sample.loss_mask == [1, 0, 1]


async def test_a_response_of_the_full_length_asks_for_nothing() -> None:
    client = Client()
    (sample,) = await resumed(ended("abcde"), client=client)
    assert (sample.status, client.requests) == (Status.TRUNCATED, [])


class Faulty(Client):
    """Answers no request that goes on from ``mute``."""

    def __init__(self, mute: str, *answers: list[Generation], failure: Exception) -> None:
        super().__init__(*answers)
        self.mute, self.failure = mute, failure

    async def generate(
        self, ids: list[int], *, sampling: SamplingParams, n: int = 1, session: None = None
    ) -> list[Generation]:
        if "".join(map(chr, ids)) == self.mute:
            raise self.failure
        return await super().generate(ids, sampling=sampling, n=n)


async def test_a_response_that_is_not_resumed_costs_itself_and_none_of_its_group() -> None:
    gone = RequestFailed("no answer within 3 s", "engine_timeout")
    client = Faulty("qab", [sampled("x", "stop", "2")], [sampled("c", "stop", "2")], failure=gone)
    whole = ended("z", status=Status.COMPLETED, reward=1.0)
    made = await resumed(ended(), whole, ended("ef"), Sample(prompt="q"), client=client)
    found = [(sample.response, sample.status, sample.failure_cause) for sample in made]
    assert found == [
        ("ab", Status.FAILED, "engine_timeout"),
        ("z", Status.COMPLETED, None),
        ("efc", Status.COMPLETED, None),
        ("x", Status.COMPLETED, None),
    ]
    assert made[0].error == "no answer within 3 s"


async def test_routes_of_the_tokens_so_far_stay_as_they_were_taken() -> None:
    before = np.zeros((2, 1, 1), np.int16)
    sample = ended(rollout_routed_experts=before)
    rest = Generation(array("i", [99]), array("f", [-0.5]), "stop", ("2",), routed_experts=np.ones((3, 1, 1), np.int16))
    await resumed(sample, client=Client([rest]))
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 0, 1]


def chosen(*, takes_groups: bool = True, resumes: bool = True) -> RoutedComponent:
    return RoutedComponent("x", None, takes_groups, resumes=resumes)


@pytest.mark.parametrize(
    ("resumes", "generator", "rests"),
    [
        (True, chosen(), ["ab", "z", ""]),
        (True, chosen(takes_groups=False), ["ab", "z", ""]),
        (True, chosen(takes_groups=False, resumes=False), ["", "z", ""]),
        (True, chosen(resumes=False), ["", "", ""]),
        (False, chosen(), ["", "", ""]),
    ],
)
def test_a_group_keeps_the_samples_of_an_earlier_try_that_can_resume(
    resumes: bool, generator: RoutedComponent, rests: list[str]
) -> None:
    whole = ended("z", status=Status.COMPLETED, reward=1.0)
    failed = ended("", status=Status.FAILED, error="lost", failure_cause="engine")
    group = [ended(), whole, failed]
    prepare_group(group, generator, chosen(takes_groups=False), resumes=resumes)
    assert [sample.response for sample in group] == rests
    assert (failed.status, failed.error, failed.failure_cause) == (Status.PENDING, None, None)
    assert whole.reward == (1.0 if rests[1] else None)


def test_a_reward_that_compares_samples_is_computed_again() -> None:
    whole = ended("z", status=Status.COMPLETED, reward=1.0)
    prepare_group([ended(), whole], chosen(), chosen(takes_groups=True), resumes=True)
    assert (whole.response, whole.reward) == ("z", None)


def test_a_finished_group_that_comes_again_is_restarted() -> None:
    whole = ended("z", status=Status.COMPLETED, reward=1.0)
    prepare_group([whole], chosen(), chosen(), resumes=True)
    assert (whole.response, whole.status, whole.weight_spans) == ("", Status.PENDING, [])


def siblings(*statuses: Status) -> PromptGroup:
    """What one generation fanned out into, between two samples that stand alone."""
    fanned = [ended(str(place), index=7, rollout_id=0, status=status) for place, status in enumerate(statuses)]
    return [ended("a", index=6, status=Status.COMPLETED), *fanned, ended("b", index=8)]


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("takes_groups", [False, True])
def test_a_restarted_fan_out_is_one_sample_again(resumes: bool, takes_groups: bool) -> None:
    group = siblings(Status.COMPLETED, Status.ABORTED, Status.COMPLETED)
    prepare_group(group, chosen(takes_groups=takes_groups, resumes=False), chosen(), resumes=resumes)
    assert [(sample.index, sample.rollout_id) for sample in group] == [(6, None), (7, None), (8, None)]
    assert [sample.status for sample in group[1:]] == [Status.PENDING] * 2


def test_complete_siblings_stay_together_while_another_response_resumes() -> None:
    group = siblings(Status.COMPLETED, Status.TRUNCATED)
    prepare_group(group, chosen(takes_groups=False, resumes=False), chosen(takes_groups=False), resumes=True)
    assert [(sample.index, sample.response) for sample in group] == [(6, "a"), (7, "0"), (7, "1"), (8, "")]


def test_siblings_from_another_source_stay_as_they_were_given() -> None:
    group = siblings(Status.PENDING, Status.PENDING)
    prepare_group(group, chosen(), chosen(), resumes=False)
    assert [(sample.index, sample.rollout_id) for sample in group] == [(6, None), (7, 0), (7, 0), (8, None)]


async def test_an_answer_without_a_token_records_no_version() -> None:
    nothing = Generation(array("i"), array("f"), "abort", ("2",), weight_spans=(("2", 0, 0),))
    (sample,) = await resumed(ended(), client=Client([nothing]))
    assert (sample.weight_versions, sample.weight_spans, sample.status) == (["1"], [("1", 0, 2)], Status.ABORTED)
