"""Reward models in the sampler, and weighted sums of them: whoever fails is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime_core.config.sampling import reward_terms
from slime_core.errors import DataError, PluginError, RunError, SlimeError
from slime_core.rollout.reward_scoring import InProcessScorer, WeightedSum, part_metrics
from slime_core.types import RewardFailure, Sample

ROW: dict[str, Any] = {"source": "toy"}


class Given:
    """Answers what it is made with, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def score(self, samples: list[Sample]) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (ValueError("no answer"), PluginError, "'mine': .*ValueError: no answer"),
        (None, PluginError, "'mine': .*TypeError: 'NoneType' "),
        (DataError("no label"), DataError, "^no label$"),
        ([1.0], RunError, "'mine' .*1 rewards .* 2 samples$"),
    ],
)
async def test_a_reward_model_that_raises_or_returns_nonsense_ends_the_run(
    answer: Any, kind: type[SlimeError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await InProcessScorer("mine", Given(answer)).score([Sample(), Sample()])


async def summed(written: str, *parts: list[Any]) -> tuple[list[Any], list[Sample]]:
    samples = [Sample(index=index, metadata=ROW) for index in range(len(parts[0]))]
    scorers: Any = list(zip(reward_terms(written) or (), map(Given, parts), strict=True))
    return await WeightedSum(written, scorers).score(samples), samples


async def test_parts_are_added_with_their_weights_and_kept() -> None:
    rewards, samples = await summed("0.7*math+0.3*f1", [1.0, 0.0], [0.5, 1.0])
    assert rewards == [0.85, 0.3]
    assert [sample.metadata["reward_parts"] for sample in samples] == [
        {"math": 1.0, "f1": 0.5},
        {"math": 0.0, "f1": 1.0},
    ]
    assert ROW == {"source": "toy"}
    assert part_metrics(samples, "x") == {"x/f1": 0.75, "x/math": 0.5}
    named = [{"score": -1.0, "acc": 0.0}]
    assert (await summed("1*dapo:score+1*dapo:acc", named, named))[0] == [-1.0]


async def test_a_failed_part_fails_its_sample_with_its_cause_and_its_name() -> None:
    failure = RewardFailure("timeout", "slow", lost=True)
    (failed, total), samples = await summed("1*a+1*b", [1.0, 1.0], [failure, 2.0])
    assert (failed.cause, failed.lost, total) == ("timeout", True, 3.0)
    assert re.search("part b .*: slow$", failed.error)
    assert part_metrics(samples, "x") == {"x/a": 1.0, "x/b": 2.0}


async def test_a_part_or_a_sum_that_is_no_number_costs_its_sample() -> None:
    failures = (await summed("1*a", [float("nan"), {"acc": 1.0}]))[0] + (await summed("1*a:b", [1.0, {"acc": 1.0}]))[0]
    for failure, part in zip(failures, ["a", "a", "a:b", "a:b"], strict=True):
        assert (failure.cause, f"part {part} " in failure.error) == ("invalid", True)
    sums, _ = await summed("1000*a+1*b", [1e306, 1.7e305, 1.0], [0.0, 1.7e308, 2.0])
    assert (sums[0].cause, sums[1].cause, sums[2]) == ("invalid", "invalid", 1002.0)


@pytest.mark.parametrize(
    ("written", "parts", "reward"),
    [
        ("0.7*a+0.2*b+0.1*c", [1.0, 1.0, 1.0], 1.0),  # 0.9999999999999999 in floating point
        ("0.1*a+0.1*b+0.1*c", [1.0, 1.0, 1.0], 0.3),
        ("0.7*a+0.3*b", [0.1, 0.1], 0.1),
        ("0.3*a-0.1*b-0.2*c", [1.0, 1.0, 1.0], 0.0),
    ],
)
async def test_full_marks_in_every_part_are_full_marks_of_the_sum(
    written: str, parts: list[float], reward: float
) -> None:
    assert (await summed(written, *[[part] for part in parts]))[0] == [reward]
