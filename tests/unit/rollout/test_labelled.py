from __future__ import annotations

from array import array
from typing import Any

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import FromLabel
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.generation import GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import LogProbs, Sample, Status, TokenIds


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    """The arithmetic tokenizer: digit d is id 5 + d, + is 15, the end is 1."""
    return PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)


class Engine:
    """Answers 3 and counts its requests."""

    def __init__(self) -> None:
        self.requests = 0

    async def generate(self, input_ids: list[int], *, sampling: SamplingParams, n: int = 1) -> list[Generation]:
        self.requests += 1
        return [Generation(array("i", [8, 1]), array("f", [-1, -1]), "stop")] * n


async def answer(encoder: PromptEncoder, *labels: str | None, longest: int = 8, evaluation: bool = False) -> Any:
    engine: Any = Engine()
    context = GenerateContext(engine, encoder, evaluation=evaluation)
    samples = [Sample(group_index=3, index=i, prompt="1+1", label=label) for i, label in enumerate(labels)]
    return await FromLabel(None, RunView())(context, samples, SamplingParams(max_new_tokens=longest)), engine.requests


async def test_the_label_and_the_end_are_the_response(encoder):
    (first, second), requests = await answer(encoder, "2", "10")
    assert first.tokens == TokenIds([6, 15, 6, 7, 1])
    assert (first.response, first.response_length, first.status) == ("2", 2, Status.COMPLETED)
    assert second.tokens == TokenIds([6, 15, 6, 6, 5, 1])
    assert second.rollout_log_probs == LogProbs([0.0] * 3)
    assert second.loss_mask is None  # every response token trains, the prompt does not
    assert second.weight_versions == []
    assert requests == 0


async def test_a_label_that_is_too_long_is_cut(encoder):
    (sample,), _ = await answer(encoder, "123", longest=3)
    assert sample.tokens == TokenIds([6, 15, 6, 6, 7, 8])
    assert (sample.response_length, sample.status) == (3, Status.TRUNCATED)


async def test_an_evaluation_asks_the_engines(encoder):
    (sample,), requests = await answer(encoder, "2", evaluation=True)
    assert (sample.response, requests) == ("3", 1)


async def test_a_sample_without_a_label_is_refused(encoder):
    with pytest.raises(DataError, match=r"(?s)'from_label': sample 1 of group 3 .*--label-key"):
        await answer(encoder, "2", None)
