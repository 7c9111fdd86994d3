"""Weighted sums of reward models: their syntax, and the messages for sums that cannot be read."""

import pytest

from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from tests.unit.config.broken import blames, refused


@pytest.mark.parametrize(
    ("written", "terms"),
    [
        ("0.7*math+0.3*f1", [RewardTerm(0.7, "math"), RewardTerm(0.3, "f1")]),
        (" 1 * math - .5*f1-2 * d:acc ", [RewardTerm(1, "math"), RewardTerm(-0.5, "f1"), RewardTerm(-2, "d", "acc")]),
        ("-1*a-b+2*c", [RewardTerm(-1, "a-b"), RewardTerm(2, "c")]),
        ("2*x+1", [RewardTerm(2, "x+1")]),
    ],
)  # fmt: skip
def test_a_sum_is_weights_and_names_and_a_name_may_hold_signs(written, terms):
    assert reward_terms(written) == tuple(terms)


def test_a_name_alone_is_no_sum():
    assert reward_terms("exact_match") is None
    assert reward_names("exact_match") == ("exact_match",)


def test_the_models_of_a_sum_are_named_once():
    assert reward_names("1*dapo:acc+2*dapo:score+1*math") == ("dapo", "math")


@pytest.mark.parametrize("written", ["math*0.7", "0.7*", "a*b", "1*math+*f1", "0.5*math:", "1*math+2*math"])
def test_a_malformed_sum_is_refused(written):
    blames(refused("--rm-type", written), "rm_type", f"{written!r} ")
    table = f"name = 'a', path = 'a.jsonl', rm_type = '{written}'"
    blames(refused("--eval-datasets", table), "eval_datasets", f"{written!r} ")
