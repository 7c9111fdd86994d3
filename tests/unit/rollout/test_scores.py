from __future__ import annotations

import pytest

from slime_core.rollout.scores import MOST_VALUES, EvalScores, score
from slime_core.types import Sample, Status


def sample(reward, status=Status.COMPLETED, **metadata):
    return Sample(reward=reward, status=status, metadata=metadata)


def test_scores_are_means_overall_and_by_metadata():
    carried = [sample(0.0, carries=1), sample(1.0, carries=1), sample(0.0, Status.TRUNCATED, carries=1)]
    found = score([sample(1.0, carries=0), *carried], key=None)
    assert (found.mean, found.count, found.truncated) == (0.5, 4, 0.25)
    assert found.by == {"carries": {"0": (1.0, 1), "1": (pytest.approx(1 / 3), 3)}}


def test_named_rewards_are_read_by_key():
    assert score([sample({"a": 1.0, "b": 0.25})], key="b").mean == 0.25


def test_a_field_with_one_value_or_with_very_many_is_left_out():
    many = [sample(1.0, same="x", unique=number, few=number % 2) for number in range(MOST_VALUES + 1)]
    assert list(score(many, key=None).by) == ["few"]


def test_a_field_that_holds_no_plain_value_is_left_out():
    assert score([sample(1.0, parts=[1], kind="a"), sample(0.0, parts=[2], kind="b")], key=None).by.keys() == {"kind"}


def test_metrics_are_flat_names():
    scores = EvalScores(0.5, 4, 0.25, {"carries": {"0": (1.0, 1), "1": (0.25, 3)}})
    assert scores.metrics("eval/sums") == {
        "eval/sums": 0.5,
        "eval/sums-truncated_ratio": 0.25,
        "eval/sums/carries=0": 1.0,
        "eval/sums/carries=1": 0.25,
    }


def test_an_evaluation_without_samples_or_with_unrewarded_ones_is_refused():
    with pytest.raises(ValueError, match="without samples"):
        score([], key=None)
    with pytest.raises(ValueError, match="has no reward"):
        score([sample(None)], key=None)
