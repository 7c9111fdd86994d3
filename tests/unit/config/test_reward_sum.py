"""Weighted sums of reward models: their syntax, and the messages for sums that cannot be read."""

import pytest

from slime_core.config.load import load
from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from slime_core.errors import ConfigError


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


@pytest.mark.parametrize("written", ["math*0.7", "0.7*", "a*b", "1*math+*f1", "0.5*math:"])
def test_a_malformed_sum_is_refused(written):
    assert refused("--rm-type", written) == (
        f"--rm-type: {written!r} is not a sum of reward models; accepted: WEIGHT*NAME+WEIGHT*NAME, such as "
        "'0.7*math+0.3*f1', or WEIGHT*NAME:KEY for one of several numbers, such as '0.3*dapo:acc'"
    )


def test_a_part_that_is_named_twice_is_refused():
    assert refused("--rm-type", "1*math+2*math") == "--rm-type: '1*math+2*math' names a part twice; add up its weights"


def test_a_sum_of_an_evaluation_set_is_read_too():
    table = "name = 'a', path = 'a.jsonl', rm_type = '1*math+2*math'"
    assert refused("--eval-datasets", table) == (
        "--eval-datasets: '1*math+2*math' names a part twice; add up its weights"
    )


def refused(*argv):
    with pytest.raises(ConfigError) as caught:
        load(argv, check_rules=False)
    (line,) = str(caught.value).splitlines()[1:-1]
    return line.removeprefix("  - ")
