"""Aborted responses, which resume from their tokens."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from slime_core import RunView
from slime_core.builtin.rollout import SingleTurn
from slime_core.errors import EngineError, RequestFailed, RequestRefused
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.rollout.components import RoutedComponent
from slime_core.rollout.group_generator import prepare_group
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds


class Encoder:
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


def answer(text: str, reason: Any, version: str, log_prob: float = -0.5) -> Generation:
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
    context: Any = GenerateContext(client, Encoder(), masks_resumed=masks)
    return await SingleTurn(None, RunView())(context, list(samples), LONG)


async def test_an_aborted_response_resumes_from_its_tokens() -> None:
    client = Client([answer("cd", "stop", "2")])
    (sample,) = await resumed(ended(), client=client)
    assert client.requests == [("qab", 3, 1)]
    assert (sample.response, sample.response_length, sample.status) == ("abcd", 4, Status.COMPLETED)
    assert sample.tokens == [ord(one) for one in "qabcd"]
    assert list(sample.rollout_log_probs or ()) == [-1.0, -1.0, -0.5, -0.5]
    assert sample.weight_versions == ["1", "2"]
    assert sample.weight_spans == [("1", 0, 2), ("2", 2, 4)]
    assert sample.loss_mask is None


async def test_only_what_was_added_is_trained_where_the_run_says_so() -> None:
    (sample,) = await resumed(ended(), client=Client([answer("c", "abort", "2")]), masks=True)
    assert (sample.loss_mask, sample.status) == ([0, 0, 1], Status.ABORTED)
    (sample,) = await resumed(sample, client=Client([answer("d", "stop", "3")]), masks=True)
    assert (sample.loss_mask, sample.weight_versions) == ([0, 0, 0, 1], ["1", "2", "3"])


async def test_a_mask_that_is_there_grows() -> None:
    (sample,) = await resumed(ended(loss_mask=Mask([1, 0])), client=Client([answer("c", "stop", "2")]))
    assert sample.loss_mask == [1, 0, 1]


async def test_a_response_of_the_full_length_asks_for_nothing() -> None:
    client = Client()
    (sample,) = await resumed(ended("abcde"), client=client)
    assert (sample.status, client.requests) == (Status.TRUNCATED, [])


async def test_only_unfinished_samples_of_a_group_are_requested() -> None:
    client = Client([answer("x", "stop", "2"), answer("y", "length", "2")], [answer("c", "stop", "2")])
    whole = ended("z", status=Status.COMPLETED)
    group = [Sample(prompt="q"), whole, ended(), Sample(prompt="q")]
    made = await resumed(*group, client=client)
    assert client.requests == [("q", 5, 2), ("qab", 3, 1)]
    assert [sample.response for sample in made] == ["x", "z", "abc", "y"]
    assert made[1] is whole


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
    client = Faulty("qab", [answer("x", "stop", "2")], [answer("c", "stop", "2")], failure=gone)
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


async def test_samples_that_share_a_request_fail_together() -> None:
    client = Faulty("q", [answer("c", "stop", "2")], failure=EngineError("sent 1 token with 2 log-probabilities"))
    made = await resumed(Sample(prompt="q"), ended(), Sample(prompt="q"), client=client)
    assert [(sample.status, sample.failure_cause) for sample in made] == [
        (Status.FAILED, "engine"),
        (Status.COMPLETED, None),
        (Status.FAILED, "engine"),
    ]


async def test_a_refused_request_ends_the_run() -> None:
    with pytest.raises(RequestRefused, match="too long"):
        await resumed(ended(), client=Faulty("qab", failure=RequestRefused("too long")))


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


def test_siblings_of_which_one_resumes_stay_together() -> None:
    group = siblings(Status.COMPLETED, Status.ABORTED)
    prepare_group(group, chosen(takes_groups=False), chosen(takes_groups=False), resumes=True)
    assert [sample.response for sample in group] == ["a", "0", "1", "b"]


def test_siblings_from_another_source_stay_as_they_were_given() -> None:
    group = siblings(Status.PENDING, Status.PENDING)
    prepare_group(group, chosen(), chosen(), resumes=False)
    assert [(sample.index, sample.rollout_id) for sample in group] == [(6, None), (7, 0), (7, 0), (8, None)]


async def test_an_answer_without_a_token_records_no_version() -> None:
    nothing = Generation(array("i"), array("f"), "abort", ("2",), weight_spans=(("2", 0, 0),))
    (sample,) = await resumed(ended(), client=Client([nothing]))
    assert (sample.weight_versions, sample.weight_spans, sample.status) == (["1"], [("1", 0, 2)], Status.ABORTED)
