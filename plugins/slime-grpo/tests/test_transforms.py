"""DAPO's transforms, each by hand."""

from __future__ import annotations

import pytest

from slime_core import RunView, Transformed
from slime_core.types import Sample, Status
from slime_grpo.options import GrpoOptions
from slime_grpo.transforms import DropZeroStd, MaskTruncated, PunishOverlong


def rewarded(*rewards, key: str | None = None) -> Transformed:
    return DropZeroStd(GrpoOptions(), RunView(reward_key=key))([Sample(reward=reward) for reward in rewards])


def test_a_group_of_equal_rewards_is_dropped_and_one_that_differs_is_kept():
    assert rewarded(1.0, 1.0, 1.0).dropped == "zero_std"
    assert rewarded(1.0, 0.0, 1.0).dropped is None


def test_rewards_that_differ_by_the_rounding_of_a_sum_are_equal():
    assert rewarded(1.0, 0.7 + 0.2 + 0.1).dropped == "zero_std"
    assert rewarded(0.3, 0.1 + 0.2, 0.3).dropped == "zero_std"
    assert rewarded(0.0, 0.3 - 0.1 - 0.2).dropped == "zero_std"
    assert rewarded(1e6, 1e6 + 1e-6).dropped == "zero_std"
    assert rewarded(1.0, 1.000001).dropped is None
    assert rewarded(0.0, 1e-6).dropped is None


def test_a_group_of_one_is_dropped():
    assert rewarded(1.0).dropped == "zero_std"


def test_the_reward_that_trains_decides_among_named_rewards():
    rewards = ({"score": 1.0, "acc": 0.0}, {"score": 1.0, "acc": 1.0})
    assert rewarded(*rewards, key="score").dropped == "zero_std"
    assert rewarded(*rewards, key="acc").dropped is None


def test_truncated_samples_are_masked_and_counted_once():
    group = [Sample(status=Status.TRUNCATED), Sample(status=Status.COMPLETED), Sample(status=Status.TRUNCATED)]
    group[2].remove_sample = True
    found = MaskTruncated(GrpoOptions(), RunView())(group)
    assert [sample.remove_sample for sample in found.samples] == [True, False, True]
    assert (found.dropped, found.changed) == (None, {"truncated": 1})


def punished(length: int, reward=1.0, *, key: str | None = None, **options):
    sample = Sample(reward=reward, response_length=length)
    found = PunishOverlong(GrpoOptions(**options), RunView(max_response_len=20, reward_key=key))([sample])
    return sample.reward, found.changed


@pytest.mark.parametrize(("length", "worth"), [(1, 1.0), (12, 1.0), (14, 0.75), (20, 0.0), (60, 0.0)])
def test_the_last_stretch_costs_ever_more(length, worth):
    # L = 20 and C = 8: free up to 12 tokens; 14 are 2 / 8 into the stretch. Turns of tools may go beyond L.
    found, changed = punished(length, overlong_buffer_len=8)
    assert found == pytest.approx(worth)
    assert changed == ({"overlong": 1} if length > 12 else {})


def test_the_factor_scales_what_is_lost():
    assert punished(20, overlong_buffer_len=8, overlong_penalty_factor=0.5)[0] == pytest.approx(0.5)


def test_by_default_a_fifth_of_the_limit_is_the_stretch():
    assert [punished(length)[0] for length in (16, 18, 20)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_reward_that_trains_is_lowered_among_named_rewards():
    assert punished(20, {"score": 1.0, "acc": 1.0}, key="score")[0] == {"score": 0.0, "acc": 1.0}


@pytest.mark.parametrize("run_key", [None, "score"])
def test_the_reward_that_a_row_names_is_lowered_whatever_the_run_names(run_key):
    sample = Sample(reward={"score": 1.0, "acc": 1.0}, response_length=20, metadata={"reward_key": "acc"})
    PunishOverlong(GrpoOptions(), RunView(max_response_len=20, reward_key=run_key))([sample])
    assert sample.reward == {"score": 1.0, "acc": 0.0}
