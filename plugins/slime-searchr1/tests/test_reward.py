from __future__ import annotations

import time

import pytest

from slime_core import RunView, Sample
from slime_core.errors import DataError
from slime_searchr1.options import SearchOptions
from slime_searchr1.protocol import NO_ACTION
from slime_searchr1.reward import AnswerMatch, final_answer, normalised


def model(**options: float) -> AnswerMatch:
    return AnswerMatch(SearchOptions(**options), RunView())


async def scores(response: str, label: str | None, **options: float) -> dict[str, float]:
    (found,) = await model(**options).score([Sample(group_index=1, index=5, response=response, label=label)])
    return found


async def score(response: str, label: str | None) -> float:
    return (await scores(response, label))["exact_match"]


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
        ('{"style": "rule", "ground_truth": {"target": ["Beatles", "Fab Four"]}}', 1.0),
        ('{"style": "rule", "ground_truth": {"target": ["Fab Four"]}}', 0.0),
        ('{"ground_truth": "Beatles"}', 1.0),
        ('{"other": "Beatles"}', 0.0),
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
    assert [one["exact_match"] for one in await model().score(samples)] == [0.0, 0.0, 1.0, 0.0]


async def test_a_sample_without_a_label_is_named():
    with pytest.raises(DataError, match="'search_r1': sample 5"):
        await score("<answer>2</answer>", None)


SEARCHED = "I wonder.<search>beatles</search>\n\n<information>Doc 1(Title: Pop) x</information>\n\n"


@pytest.mark.parametrize(
    ("response", "form"),
    [
        ("<answer>Paris</answer>", 1.0),
        ("<think>easy</think> <answer>Paris</answer>\n", 1.0),
        (SEARCHED + SEARCHED + "So.<answer>Paris</answer>", 1.0),
        (SEARCHED, 0.0),
        (SEARCHED + "<answer>Paris", 0.0),
        ("<search>beatles</search> <answer>Paris</answer>", 0.0),
        ("<information>Paris</information><answer>Paris</answer>", 0.0),
        (SEARCHED + "<information>forged</information><answer>Paris</answer>", 0.0),
        ("<answer>Rome</answer><answer>Paris</answer>", 0.0),
        ("<answer>Paris</answer> is right", 0.0),
        ("Paris" + NO_ACTION + "<answer>Paris</answer>", 0.0),
        ("<answer><search>Paris</answer>", 0.0),
        ("", 0.0),
    ],
)
async def test_a_response_has_the_form_if_it_is_searches_and_one_answer_at_its_end(response, form):
    assert (await scores(response, "Paris"))["format"] == form


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>Paris</answer>", 1.0),
        ("<answer>Rome</answer>", 0.25),
        ("<answer>Paris</answer> !", 0.75),
        ("Paris", 0.0),
    ],
)
async def test_the_score_weighs_answer_and_form(response, reward):
    assert (await scores(response, "Paris", format_score=0.25))["score"] == reward
    assert (await scores(response, "Paris", format_score=0.0))["score"] == (reward >= 0.75)


async def test_a_long_response_without_the_form_is_read_in_time():
    response = SEARCHED * 20_000 + "<search>"
    started = time.monotonic()
    assert (await scores(response, "Paris"))["format"] == 0.0
    assert time.monotonic() - started < 5
