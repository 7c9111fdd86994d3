"""DAPO's transforms, each by hand."""

from __future__ import annotations

import pytest

from slime_core import RunView, Sample, Status
from slime_grpo.options import GrpoOptions
from slime_grpo.transforms import drop_zero_std, mask_truncated, punish_overlong


@pytest.mark.parametrize(
    ("rewards", "is_dropped"),
    [
        ([1.0, 1.0, 1.0], True),
        ([1.0, 0.0, 1.0], False),
        ([1.0], True),
        ([1.0, 0.7 + 0.2 + 0.1], True),  # rewards that differ by the rounding of a sum are equal
        ([0.0, 0.3 - 0.1 - 0.2], True),
        ([1e6, 1e6 + 1e-6], True),
        ([1.0, 1.000001], False),
        ([0.0, 1e-6], False),
    ],
)
def test_a_group_of_equal_rewards_is_dropped(rewards: list[float], is_dropped: bool) -> None:
    group = [Sample(reward=reward) for reward in rewards]
    assert drop_zero_std(group, RunView()).dropped == ("zero_std" if is_dropped else None)


def test_the_reward_that_trains_decides_among_named_rewards() -> None:
    group = [Sample(reward={"score": 1.0, "acc": accuracy}) for accuracy in (0.0, 1.0)]
    assert drop_zero_std(group, RunView(reward_key="score")).dropped == "zero_std"
    assert drop_zero_std(group, RunView(reward_key="acc")).dropped is None


def test_truncated_samples_are_masked_and_counted_once() -> None:
    group = [Sample(status=Status.TRUNCATED), Sample(status=Status.COMPLETED), Sample(status=Status.TRUNCATED)]
    group[2].remove_sample = True
    transformed = mask_truncated(group)
    assert [sample.remove_sample for sample in transformed.samples] == [True, False, True]
    assert (transformed.dropped, transformed.changed) == (None, {"truncated": 1})


@pytest.mark.parametrize(
    ("length", "reward", "options"),
    [
        # L = 20 and C = 8: free up to 12 tokens; 14 are 2 / 8 into the interval. Turns of tools may go beyond L.
        *((length, reward, {"overlong_buffer_len": 8}) for length, reward in ((1, 1), (12, 1), (14, 0.75), (20, 0))),
        (60, 0.0, {"overlong_buffer_len": 8}),
        (20, 0.5, {"overlong_buffer_len": 8, "overlong_penalty_factor": 0.5}),
        # By default C is a fifth of L.
        *((length, reward, {}) for length, reward in ((16, 1), (18, 0.5), (20, 0))),
    ],
)
def test_the_last_interval_costs_ever_more(length: int, reward: float, options: dict[str, float]) -> None:
    sample = Sample(reward=1.0, response_length=length)
    transformed = punish_overlong([sample], GrpoOptions(**options), RunView(max_response_len=20))
    assert sample.reward == pytest.approx(reward)
    assert transformed.changed == ({"overlong": 1} if reward < 1 else {})


@pytest.mark.parametrize(
    ("run_key", "row_key", "lowered"), [("score", None, "score"), (None, "acc", "acc"), ("score", "acc", "acc")]
)
def test_the_reward_that_trains_is_lowered_among_named_rewards(run_key, row_key, lowered) -> None:
    metadata = {} if row_key is None else {"reward_key": row_key}
    sample = Sample(reward={"score": 1.0, "acc": 1.0}, response_length=20, metadata=metadata)
    punish_overlong([sample], GrpoOptions(), RunView(max_response_len=20, reward_key=run_key))
    assert sample.reward == {"score": 1.0, "acc": 1.0, lowered: 0.0}
