from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import SingleTurn
from slime_core.errors import EngineError, RunError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Sample, Status, TokenIds

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"


@pytest.fixture(scope="module")
def encoder():
    """The arithmetic tokenizer: digit d is id 5 + d, + is 15, the end is 1."""
    return PromptEncoder(FOLDER, apply_chat_template=False)


class OneAnswer:
    """Answers every request alike and remembers it."""

    def __init__(self, *answers: Generation) -> None:
        self.answers, self.requests = list(answers), []

    async def generate(self, input_ids, *, sampling, n=1):
        self.requests.append((list(input_ids), sampling, n))
        if not self.answers:
            raise EngineError("no engine answered")
        return self.answers


def group(count):
    return [Sample(group_index=0, index=i, prompt="1+1", label="2") for i in range(count)]


async def respond(encoder, client, samples, sampling=None):
    context = GenerateContext(client, encoder)
    return await SingleTurn(None, RunView())(context, samples, sampling or SamplingParams())


async def test_tokens_and_log_probs_are_kept_as_the_engine_returned_them(encoder):
    # Two ids that decode to nothing and a value that float64 would print differently.
    client = OneAnswer(Generation(array("i", [7, 0, 1]), array("f", [-0.1, -2.5, -0.0]), "stop", ("3", "4"), "ignored"))
    (sample,) = await respond(encoder, client, group(1))
    assert sample.tokens == TokenIds([6, 15, 6, 7, 0, 1])
    assert sample.rollout_log_probs == LogProbs([-0.1, -2.5, -0.0])
    assert (sample.response, sample.response_length) == ("2", 3)
    assert sample.weight_versions == ["3", "4"]
    assert (type(sample.tokens), type(sample.rollout_log_probs)) == (TokenIds, LogProbs)


async def test_a_group_is_one_request_and_its_answers_go_to_its_samples_in_order(encoder):
    client = OneAnswer(
        Generation(array("i", [7, 1]), array("f", [-1, -1]), "stop"),
        Generation(array("i", [8]), array("f", [-2]), "length"),
    )
    sampling = SamplingParams(temperature=0.7, max_new_tokens=9)
    samples = await respond(encoder, client, group(2), sampling)
    assert client.requests == [([6, 15, 6], sampling, 2)]
    assert [(s.index, s.response, s.label) for s in samples] == [(0, "2", "2"), (1, "3", "2")]


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)]
)
async def test_the_reason_for_the_end_is_the_status(encoder, reason, status):
    client = OneAnswer(Generation(array("i", [7]), array("f", [-1]), reason))
    assert [s.status for s in await respond(encoder, client, group(1))] == [status]


async def test_another_number_of_answers_than_samples_is_refused(encoder):
    client = OneAnswer(Generation(array("i", [7]), array("f", [-1]), "stop"))
    with pytest.raises(RunError, match=r"2 responses .* 1"):
        await respond(encoder, client, group(2))


async def test_a_failing_engine_fails_its_samples_with_the_reason(encoder):
    found = await respond(encoder, OneAnswer(), group(2))
    assert [(one.status, one.error, one.failure_cause) for one in found] == [
        (Status.FAILED, "no engine answered", "engine")
    ] * 2
