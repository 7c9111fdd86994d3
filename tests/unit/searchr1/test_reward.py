from __future__ import annotations

import pytest

from slime_core import RunView, Sample
from slime_core.errors import DataError
from slime_searchr1.reward import AnswerMatch, final_answer, normalised


async def score(response: str, label: str | None) -> float:
    return (await AnswerMatch(None, RunView()).score([Sample(group_index=1, index=5, response=response, label=label)]))[
        0
    ]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>Paris</answer>", "Paris"),
        ("<answer>Rome</answer> no: <answer>\n Paris </answer> done", "Paris"),
        ("<answer>Rome</answer> <answer>Paris", "Rome"),
        ("<answer>Rome <answer>Paris</answer>", "Paris"),
        ("</answer> Paris <answer>", None),
        ("Paris", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_final_answer_is_the_last_complete_one(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple, a day", "apple day"),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("  two\twords\n", "two words"),
    ],
)
def test_answers_are_normalised_as_in_squad(text, bare):
    assert normalised(text) == bare


@pytest.mark.parametrize(
    ("label", "reward"),
    [
        ("beatles", 1.0),
        ('["Rolling Stones", "Beatles"]', 1.0),
        ("Beatle", 0.0),
        ('["Rolling Stones"]', 0.0),
        ("[Beatles]", 1.0),
        ("[]", 0.0),
    ],
)
async def test_an_answer_is_compared_with_every_label(label, reward):
    assert await score("<think>?</think><answer>The Beatles</answer>", label) == reward


async def test_a_number_as_label_is_text():
    assert await score("<answer>42</answer>", "42") == 1.0
    assert await score("<answer>1969</answer>", "[1969, 1970]") == 1.0


async def test_a_response_without_an_answer_gets_nothing():
    assert await score("The Beatles", "The Beatles") == 0.0


async def test_rewards_stand_in_the_order_of_the_samples():
    samples = [Sample(response=f"<answer>{number}</answer>", label="2") for number in range(4)]
    assert await AnswerMatch(None, RunView()).score(samples) == [0.0, 0.0, 1.0, 0.0]


async def test_a_sample_without_a_label_is_named():
    with pytest.raises(DataError, match="'search_r1': sample 5 of group 1 has no label to compare with"):
        await score("<answer>2</answer>", None)
