"""The reward: the final answer, its comparison with the label, and the form."""

from __future__ import annotations

import pytest

from slime_core import Sample
from slime_core.errors import DataError
from slime_searchr1.options import SearchOptions
from slime_searchr1.protocol import NO_ACTION
from slime_searchr1.reward import AnswerMatch


async def scores(response: str, label: str | None = "Paris", *, share: float = 0.2) -> dict[str, float]:
    sample = Sample(group_index=1, index=5, response=response, label=label)
    (reward,) = await AnswerMatch(SearchOptions(format_score=share)).score([sample])
    return reward


@pytest.mark.parametrize(
    ("response", "match"),
    [
        ("<answer>Rome</answer> no: <answer>\n Paris </answer> done", 1.0),
        ("<answer>Paris</answer> <answer>Rome", 1.0),
        ("<answer>Rome <answer>Paris</answer>", 1.0),
        ("</answer> Paris <answer>", 0.0),
        ("Paris", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
async def test_the_final_answer_is_the_last_complete_one(response: str, match: float) -> None:
    assert (await scores(response))["exact_match"] == match


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        ("The Beatles", "beatles", 1.0),
        ("The Beatles", '["Rolling Stones", "Beatles"]', 1.0),
        ("The Beatles", "Beatle", 0.0),
        ("The Beatles", '["Rolling Stones"]', 0.0),
        ("The Beatles", "[Beatles]", 1.0),
        ("The Beatles", "[]", 0.0),
        ("The Beatles", '{"style": "rule", "ground_truth": {"target": ["Beatles", "Fab Four"]}}', 1.0),
        ("The Beatles", '{"style": "rule", "ground_truth": {"target": ["Fab Four"]}}', 0.0),
        ("The Beatles", '{"ground_truth": "Beatles"}', 1.0),
        ("The Beatles", '{"other": "Beatles"}', 0.0),
        ("The  Beatles!", "a beatles\n", 1.0),
        ("an apple, a day", "apple day", 1.0),
        ("Theatre", "atre", 0.0),
        ("U.S.A.", "usa", 1.0),
        ("42", "42", 1.0),
        ("1969", "[1969, 1970]", 1.0),
    ],
)
async def test_an_answer_is_compared_with_those_of_the_label_as_in_squad(
    answer: str, label: str, reward: float
) -> None:
    assert (await scores(f"<think>?</think><answer>{answer}</answer>", label))["exact_match"] == reward


async def test_a_sample_without_a_label_is_named() -> None:
    with pytest.raises(DataError, match="sample 5 of group 1"):
        await scores("<answer>2</answer>", None)


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
        (SEARCHED * 20_000 + "<search>", 0.0),  # a pattern that backtracks would not end
    ],
)
async def test_a_response_has_the_form_if_it_is_searches_and_one_answer_at_its_end(response: str, form: float) -> None:
    assert (await scores(response))["format"] == form


@pytest.mark.parametrize(
    ("response", "reward"),
    [("<answer>Paris</answer>", 1), ("<answer>Rome</answer>", 0.25), ("<answer>Paris</answer> !", 0.75), ("Paris", 0)],
)
async def test_the_score_weighs_answer_and_form(response: str, reward: float) -> None:
    assert (await scores(response, share=0.25))["score"] == reward
    assert (await scores(response, share=0.0))["score"] == (reward >= 0.75)
