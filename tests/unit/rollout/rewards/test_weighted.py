"""Weighted sums of reward models: a part that fails fails its own sample, and is named."""

from __future__ import annotations

import re

from slime_core.config.sampling import reward_terms
from slime_core.rollout.reward_scoring import WeightedSum, part_metrics
from slime_core.types import RewardFailure, Sample


class Given:
    """Answers what it is made with."""

    def __init__(self, *answers):
        self._answers = answers

    async def score(self, samples):
        return list(self._answers)


async def summed(written, *scorers):
    samples = [Sample(index=index, metadata=ROW) for index in range(len(scorers[0]._answers))]
    terms = reward_terms(written)
    return await WeightedSum(written, list(zip(terms, scorers, strict=True))).score(samples), samples


ROW = {"source": "toy"}


async def test_parts_are_added_with_their_weights_and_kept():
    found, samples = await summed("0.7*math+0.3*f1", Given(1.0, 0.0), Given(0.5, 1.0))
    assert found == [0.85, 0.3]
    assert [one.metadata["reward_parts"] for one in samples] == [{"math": 1.0, "f1": 0.5}, {"math": 0.0, "f1": 1.0}]
    assert ROW == {"source": "toy"}
    assert part_metrics(samples, "x") == {"x/f1": 0.75, "x/math": 0.5}


async def test_a_key_selects_one_of_several_numbers():
    found, _ = await summed("1*dapo:score+1*dapo:acc", *[Given({"score": -1.0, "acc": 0.0})] * 2)
    assert found == [-1.0]


async def test_a_failed_part_fails_its_sample_with_its_cause_and_its_name():
    failure = RewardFailure("timeout", "slow", lost=True)
    (failed, sum_), samples = await summed("1*a+1*b", Given(1.0, 1.0), Given(failure, 2.0))
    assert (failed.cause, failed.lost, sum_) == ("timeout", True, 3.0)
    assert re.search("part b .*: slow$", failed.error)
    assert part_metrics(samples, "x") == {"x/a": 1.0, "x/b": 2.0}


async def test_a_part_that_is_no_number_is_named_with_what_is_accepted():
    found, _ = await summed("1*a", Given(float("nan"), {"acc": 1.0}))
    found += (await summed("1*a:b", Given(1.0, {"acc": 1.0})))[0]
    named = ["part a .* nan", "part a .* a:acc", r"part a:b .* 1\.0.* 'b'", "part a:b .* 'b'.* a:acc"]
    for one, names in zip(found, named, strict=True):
        assert one.cause == "invalid"
        assert re.search(names, one.error)


async def test_a_sum_that_is_no_number_costs_its_sample():
    found, _ = await summed("1000*a+1*b", Given(1e306, 1.7e305, 1.0), Given(0.0, 1.7e308, 2.0))
    message = "'1000*a+1*b' of {'a': 1e+306, 'b': 0.0} is inf; accepted: a finite number"
    assert found[0] == RewardFailure("invalid", message)
    assert (found[1].cause, found[2]) == ("invalid", 1002.0)


async def test_full_marks_in_every_part_are_full_marks_of_the_sum():
    # 0.7 + 0.2 + 0.1 is 0.9999999999999999 in floating point.
    assert (await summed("0.7*a+0.2*b+0.1*c", *[Given(1.0)] * 3))[0] == [1.0]
    assert (await summed("0.1*a+0.1*b+0.1*c", *[Given(1.0)] * 3))[0] == [0.3]
    assert (await summed("0.7*a+0.3*b", *[Given(0.1)] * 2))[0] == [0.1]
    assert (await summed("0.3*a-0.1*b-0.2*c", *[Given(1.0)] * 3))[0] == [0.0]
