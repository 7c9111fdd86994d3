"""The generate functions of the core: what an answer leaves in a sample."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from slime_compat import get_model_url
from slime_core.builtin.rollout import FromLabel, SingleTurn
from slime_core.errors import DataError, EngineError, RunError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.generation.sampling import added
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.responses import spec_metrics
from slime_core.types import LogProbs, Sample, SpecInfo, Status, TokenIds
from slime_testing.fake_engine import FakeEngine
from tests.unit.rollout.samplers import encoder


class Answers:
    """Answers every request alike; without an answer, no engine does."""

    def __init__(self, *answers: Generation) -> None:
        self.answers = answers

    async def generate(self, input_ids: Any, **_: Any) -> tuple[Generation, ...]:
        if not self.answers:
            raise EngineError("no engine answered")
        return self.answers


def generation(ids: list[int], reason: Any = "stop", log_probs: Any = None, **more: Any) -> Generation:
    return Generation(array("i", ids), array("f", log_probs or [-1.0] * len(ids)), reason, **more)


async def respond(answers: Any, *labels: str | None, function: Any = SingleTurn, **sampling: Any) -> Any:
    samples = [Sample(group_index=3, index=i, prompt="1+1", label=label) for i, label in enumerate(labels)]
    return await function()(GenerateContext(answers, encoder()), samples, SamplingParams(**sampling))


async def test_tokens_and_log_probs_are_kept_as_the_engine_returned_them() -> None:
    # Two ids that decode to nothing and a value that float64 would print differently.
    answer = generation([7, 0, 1], log_probs=[-0.1, -2.5, -0.0], weight_versions=("3", "4"))
    (sample,) = await respond(Answers(answer), "2")
    assert (sample.tokens, sample.rollout_log_probs) == (TokenIds([6, 15, 6, 7, 0, 1]), LogProbs([-0.1, -2.5, -0.0]))
    assert (sample.response, sample.response_length) == ("2", 3)
    assert sample.weight_versions == ["3", "4"]
    assert (type(sample.tokens), type(sample.rollout_log_probs)) == (TokenIds, LogProbs)


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)]
)
async def test_the_reason_for_the_end_is_the_status(reason: str, status: Status) -> None:
    assert [sample.status for sample in await respond(Answers(generation([7], reason)), "2")] == [status]


async def test_another_number_of_answers_than_samples_is_refused() -> None:
    with pytest.raises(RunError, match=r"2 responses .* 1"):
        await respond(Answers(generation([7])), "2", "2")


async def test_a_failing_engine_fails_its_samples_with_the_reason() -> None:
    samples = await respond(Answers(), "2", "2")
    assert [(one.status, one.error, one.failure_cause) for one in samples] == [
        (Status.FAILED, "no engine answered", "engine")
    ] * 2


async def test_the_label_and_the_end_are_the_response() -> None:
    first, second = await respond(None, "2", "10", function=FromLabel)
    assert first.tokens == TokenIds([6, 15, 6, 7, 1])
    assert (first.response, first.response_length, first.status) == ("2", 2, Status.COMPLETED)
    assert (second.tokens, second.rollout_log_probs) == (TokenIds([6, 15, 6, 6, 5, 1]), LogProbs([0.0] * 3))
    assert second.loss_mask is None  # every response token trains, the prompt does not
    assert second.weight_versions == []


async def test_a_label_that_is_too_long_is_cut_and_one_that_is_missing_refused() -> None:
    (sample,) = await respond(None, "123", function=FromLabel, max_new_tokens=3)
    assert sample.tokens == TokenIds([6, 15, 6, 6, 7, 8])
    assert (sample.response_length, sample.status) == (3, Status.TRUNCATED)
    with pytest.raises(DataError, match="sample 1 of group 3"):
        await respond(None, "2", None, function=FromLabel)


def test_a_generate_function_finds_a_model_by_its_name() -> None:
    urls = {"judge": "http://127.0.0.1:4000/", "teacher": "http://127.0.0.1:4001"}
    nothing: Any = None
    context = GenerateContext(nothing, nothing, models=urls)
    assert context.model_url("judge") == "http://127.0.0.1:4000"
    assert context.model_url("teacher", "/generate") == "http://127.0.0.1:4001/generate"
    args = SimpleNamespace(sglang_model_routers={"judge": ("127.0.0.1", 4000)})
    assert get_model_url(args, "judge") == "http://127.0.0.1:4000/generate"


async def test_counters_of_speculative_decoding_are_in_the_sample() -> None:
    with FakeEngine() as engine:
        engine.meta = {"completion_tokens": 12, "spec_verify_ct": 5}
        engine.meta |= {"spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 15}
        async with GenerateClient(engine.url) as client:
            (sample,) = await respond(client, "2", max_new_tokens=4)
    assert sample.spec_info == SpecInfo(7, 15, 5, 12)
    assert Sample.from_dict(sample.to_dict()).spec_info == sample.spec_info


def test_rates_of_speculative_decoding_are_those_of_all_tokens_together() -> None:
    first, second = SpecInfo(7, 15, 5, 12), SpecInfo(1, 5, 3, 4)
    assert added(first, second) == SpecInfo(8, 20, 8, 16)
    assert added(None, first) == added(first, None) == first
    assert spec_metrics([Sample(spec_info=first), Sample(spec_info=second), Sample()]) == {
        "rollout/spec/accept_rate": pytest.approx(8 / 20),
        "rollout/spec/accept_length": pytest.approx(16 / 8),
    }
    assert spec_metrics([Sample()]) == {}
