from __future__ import annotations

import itertools

import pytest

from slime_core.rollout.evaluation import MAX_VALUES, pass_at, pass_rates, scores
from slime_core.types import Sample, Status


def sample(reward, status=Status.COMPLETED, **metadata):
    return Sample(reward=reward, status=status, metadata=metadata)


def answers(group, *rewards, **fields):
    return [Sample(group_index=group, index=group * 10 + i, reward=r, **fields) for i, r in enumerate(rewards)]


def score(samples, key=None, **threshold):
    return scores(samples, "e", key=key, **threshold)


def kinds(samples):
    return {name.partition("=")[0] for name in score(samples) if "=" in name}


def passed(samples, **threshold):
    found = score(samples, **threshold)
    return {int(name.removeprefix("e-pass@")): share for name, share in found.items() if "@" in name}


def test_scores_are_means_overall_and_by_metadata():
    carried = [sample(0.0, carries=1), sample(1.0, carries=1), sample(0.0, Status.TRUNCATED, carries=1)]
    assert scores([sample(1.0, carries=0), *carried], "eval/sums", key=None) == {
        "eval/sums": 0.5,
        "eval/sums-truncated_ratio": 0.25,
        "eval/sums-pass@1": 0.5,
        "eval/sums/response_len/mean": 0.0,
        "eval/sums/response_len/max": 0.0,
        "eval/sums/carries=0": 1.0,
        "eval/sums/carries=1": pytest.approx(1 / 3),
    }


def test_a_field_with_one_value_or_with_very_many_is_left_out():
    assert kinds([sample(1.0, same="x", unique=n, few=n % 2) for n in range(MAX_VALUES + 1)]) == {"e/few"}


@pytest.mark.parametrize("value", ["a" * 61, "two\nlines"])
def test_a_field_that_holds_text_is_left_out(value):
    samples = [Sample(reward=1.0, metadata={"kind": "short"}), Sample(reward=0.0, metadata={"kind": value})]
    assert kinds(samples) == set()


def test_lengths_are_those_of_responses_that_were_given():
    given = [Sample(reward=1.0, status=Status.COMPLETED, response_length=4), sample(0.0, Status.FAILED)]
    given.append(Sample(reward=0.0, status=Status.TRUNCATED, response_length=8))
    found = score(given)
    assert (found["e/response_len/mean"], found["e/response_len/max"]) == (6.0, 8.0)
    assert not any("response_len" in name for name in score([sample(0.0, Status.FAILED)]))


def test_pass_at_k_of_a_hand_computed_case():
    # 5 responses, 2 solve: of C(5, 2) = 10 pairs C(3, 2) = 3 hold no solution, of C(5, 4) = 5 quadruples none.
    assert [pass_at(k, n=5, solved=2) for k in (1, 2, 4)] == [pytest.approx(0.4), pytest.approx(0.7), 1.0]


@pytest.mark.parametrize(("n", "solved", "k"), [(6, 2, 3), (4, 1, 2), (5, 0, 2), (5, 5, 1)])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_solution(n, solved, k):
    choices = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    assert pass_at(k, n=n, solved=solved) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_rates_are_means_over_prompts_for_powers_of_two():
    rates = pass_rates([[True, False, False, False, True], [False] * 7, []])
    assert rates == {1: pytest.approx(0.2), 2: pytest.approx(0.35), 4: pytest.approx(0.5)}
    # The prompt with a single response has no pass@2.
    assert pass_rates([[True, False, False]], of_all=True) == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1.0})
    assert pass_rates([[True, False]], of_all=True) == {1: 0.5, 2: 1.0}
    assert pass_rates([], of_all=True) == {}
    assert pass_rates([[True], [False, False]]) == {1: 0.5, 2: 0.0}
    assert pass_rates([]) == {}


def test_scores_group_responses_by_prompt_number_in_any_order():
    samples = [*answers(0, 1.0, 0.0, 0.0, 1.0), *answers(7, 0.0, 0.0, 0.0, 0.0)]
    expected = {1: pytest.approx(0.25), 2: pytest.approx(5 / 12), 4: 0.5}
    for order in (samples, samples[::-1], [*samples[1::2], *samples[::2]]):
        assert passed(order) == expected


def test_a_response_solves_its_prompt_from_the_threshold_on():
    graded = answers(0, 0.5, 0.75)
    assert passed(graded) == {1: 0.0, 2: 0.0}
    assert passed(graded, threshold=0.75) == {1: 0.5, 2: 1.0}


def test_a_sum_of_full_marks_solves_its_prompt_in_spite_of_rounding():
    assert passed(answers(0, 0.7 + 0.2 + 0.1)) == {1: 1.0}
    assert passed(answers(0, 0.1 + 0.2, 0.3), threshold=0.3) == {1: 1.0, 2: 1.0}
    assert passed(answers(0, 0.1 * 3), threshold=0.3) == {1: 1.0}
    assert passed(answers(0, 1.0 - 1e-6)) == {1: 0.0}
