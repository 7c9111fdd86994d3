"""Counters of speculative decoding."""

from __future__ import annotations

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import SingleTurn
from slime_core.config.schema import ARITHMETIC
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.generation.sampling import added
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.responses import spec_metrics
from slime_core.types import Sample, SpecInfo
from slime_testing.fake_engine import FakeEngine

SENT = {
    **{"completion_tokens": 12, "spec_verify_ct": 5, "spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 15},
    **{"spec_accept_rate": 7 / 15, "spec_accept_length": 2.4},
}


async def test_counters_of_the_engine_are_in_the_sample():
    with FakeEngine() as engine:
        engine.meta = SENT
        async with GenerateClient(engine.url) as client:
            context = GenerateContext(client, PromptEncoder(ARITHMETIC / "model", apply_chat_template=True))
            (sample,) = await SingleTurn(None, RunView())(
                context, [Sample(prompt="1+1=")], SamplingParams(max_new_tokens=4)
            )
    assert sample.spec_info == SpecInfo(7, 15, 5, 12)
    assert Sample.from_dict(sample.to_dict()).spec_info == sample.spec_info


async def test_an_engine_that_does_not_speculate_counts_nothing():
    with FakeEngine() as engine:
        async with GenerateClient(engine.url) as client:
            (answer,) = await client.generate([3], sampling=SamplingParams(max_new_tokens=2))
    assert answer.spec_info is None
    assert spec_metrics([Sample()]) == {}


def test_rates_are_those_of_all_tokens_together():
    samples = [Sample(spec_info=SpecInfo(7, 15, 5, 12)), Sample(spec_info=SpecInfo(1, 5, 3, 4)), Sample()]
    assert spec_metrics(samples) == {
        "rollout/spec/accept_rate": pytest.approx(8 / 20),
        "rollout/spec/accept_length": pytest.approx(16 / 8),
    }


def test_turns_of_one_sample_add_up():
    one, two = SpecInfo(7, 15, 5, 12), SpecInfo(1, 5, 3, 4)
    assert added(one, two) == SpecInfo(8, 20, 8, 16)
    assert added(None, one) == added(one, None) == one
    assert added(None, None) is None
