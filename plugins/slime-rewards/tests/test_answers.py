"""Where answers stand, and what mathematical, worded and multiple-choice rewards make of them."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rewards.answers import after_thinking, answer_line, last_boxed
from slime_rewards.mathematics import BoxedMathematics, Dapo, DeepScaleR, Mathematics
from slime_rewards.texts import MultipleChoice, WordOverlap, choice, word_f1


def test_the_last_complete_box_counts_with_its_braces_balanced() -> None:
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{3} and \boxed{4") == "3"
    assert last_boxed("none") is None
    assert last_boxed(r"\fbox{3} } {") == "3"
    assert last_boxed(r"\boxed{\left\{ x \right.} done") == r"\left\{ x \right."
    assert last_boxed(r"\boxed{a \boxed{b}}") == "b"
    assert last_boxed(r"\boxed{2} \boxed{" + "{" * 10) == "2"


def test_a_response_of_boxes_that_are_never_closed_takes_no_time() -> None:
    assert last_boxed(r"\boxed{" * 30_000) is None


def test_thinking_that_was_not_ended_has_no_answer() -> None:
    assert after_thinking("<think>a</think>b</think> c") == " c"
    assert after_thinking("<think>a") is None


def test_the_last_answer_line_counts() -> None:
    assert answer_line("Answer: 3\nmore\n **Answer:** 4 \nend") == "4"
    assert answer_line("the answer: none of a line's start") is None
    assert [
        answer_line(f"{before}: 4") for before in ("# Answer", "- answer", "Final answer", "> **Final Answer**")
    ] == ["4"] * 4


async def score(reward: object, response: str, label: Any) -> object:
    (found,) = await reward(None, RunView()).score([Sample(response=response, label=label)])  # type: ignore[operator]
    return found


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("0.5", r"so it is \boxed{\frac{1}{2}}", 1.0),
        ("x^2+1", r"$1 + x^2$", 1.0),
        ("12", "5 + 7 = 12", 1.0),
        ("12", r"12 would be wrong, \boxed{13}", 0.0),
        (r"\frac{\sqrt{3}}{2}", r"$\sqrt{3}/2$", 1.0),
        ("12", "no idea", 0.0),
        ("12", "", 0.0),
    ],
)
async def test_math_compares_what_expressions_mean(label: str, response: str, expected: float) -> None:
    assert await score(Mathematics, response, label) == expected


async def test_boxed_math_needs_a_box() -> None:
    assert await score(BoxedMathematics, "12", "12") == 0.0
    assert await score(BoxedMathematics, r"\boxed{3 \cdot 4}", "12") == 1.0


async def test_deepscaler_reads_only_what_follows_the_thinking() -> None:
    assert await score(DeepScaleR, r"<think>\boxed{1}</think> \boxed{2}", "2") == 1.0
    assert await score(DeepScaleR, r"<think>\boxed{2}", "2") == 0.0


async def test_deepscaler_takes_the_mark_before_the_response_for_an_end_of_thinking() -> None:
    assert await score(DeepScaleR, r"\boxed{1} ###Response: \boxed{2}", "2") == 1.0
    assert await score(DeepScaleR, r"<think>###Response \boxed{1}</think> \boxed{2}", "1") == 0.0


@pytest.mark.parametrize("answer", ["34", "$34$", r"\(34\)", r"\[34\]", r"\boxed{34}", "x = 34", "34.", "34 units"])
async def test_dapo_reads_an_answer_in_any_form(answer: str) -> None:
    assert await score(Dapo, f"Answer: {answer}", "34") == {"score": 1.0, "acc": 1.0}
    assert await score(Dapo, f"Answer: {answer}", "35") == {"score": -1.0, "acc": 0.0}


async def test_a_label_may_be_a_number() -> None:
    assert [await score(reward, "4", 4) for reward in (Mathematics, WordOverlap)] == [1.0, 1.0]


async def test_dapo_names_its_two_numbers() -> None:
    assert await score(Dapo, "work\nAnswer: 34", "34") == {"score": 1.0, "acc": 1.0}
    assert await score(Dapo, "34", "34") == {"score": -1.0, "acc": 0.0}


def test_word_f1_by_hand() -> None:
    # Two of three words against two of two: precision 2/3, recall 1.
    assert word_f1("The old, Eiffel tower!", "eiffel tower") == pytest.approx(0.8)
    assert word_f1("tower eiffel", "eiffel tower") == 1.0
    assert word_f1("x", "y") == 0.0
    assert (word_f1("the", ""), word_f1("", "x")) == (1.0, 0.0)


async def test_the_f1_reward_is_that_of_each_sample() -> None:
    assert await score(WordOverlap, "paris france", "Paris") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{C}", "C"),
        (r"not A, \boxed{(b)}", "B"),
        ("Answer: a cat, so D", "D"),
        ("Answer: D", "D"),
        ("I think the answer is (B) because A is wrong", "B"),
        ("The correct option is **c**.", "C"),
        ("Between A and B I take B", "B"),
        ("<think>the answer is A</think> C", "C"),
        ("I am lost", None),
        ("Answer: I think it is (B)", "B"),
        ("Answer: A careful look shows C", "C"),
        ("Answer: I'm sure that it is D", "D"),
        ("Answer: I", "I"),
        ("Answer: (I) the last", "I"),
        ("The answer is I.", "I"),
        ("Answer: A", "A"),
        ("Answer: A, not B", "A"),
        ("Answer: A) the first, not B", "A"),
        ("Answer: **A**", "A"),
        ("Answer: A\nB is wrong", "A"),
        ("Answer: C because B is wrong", "C"),
        ("The answer is A because B is wrong", "A"),
        ("The answer is A - B is wrong", "A"),
        ("A careful answer: I would say C", "C"),
    ],
)
def test_the_choice_that_a_text_settles_on(text: str, expected: str | None) -> None:
    assert choice(text) == expected


async def test_multiple_choice_compares_letters() -> None:
    assert await score(MultipleChoice, "Answer: B", "(b)") == 1.0
    assert await score(MultipleChoice, "Answer: B", "C") == 0.0
    assert choice("answer" + " " * 100_000) is None


@pytest.mark.parametrize("label", ["1", "Paris", "AB", ""])
async def test_a_label_that_is_no_letter_is_refused(label: str) -> None:
    with pytest.raises(DataError) as failure:
        await score(MultipleChoice, "Answer: B", label)
    assert str(failure.value) == (
        f"reward model 'gpqa': sample None of group None has the label {label!r}; accepted: the letter of the right "
        "choice, from A to J.\nName its field with --label-key."
    )


@pytest.mark.parametrize("reward", [Mathematics, BoxedMathematics, DeepScaleR, Dapo, WordOverlap, MultipleChoice])
async def test_a_sample_without_a_label_says_what_to_do(reward: object) -> None:
    with pytest.raises(DataError, match=r"has no label to compare with\.\nName the label's field with --label-key"):
        await score(reward, "Answer: 1 \\boxed{1}</think>\\boxed{1}", None)
