"""Where answers stand, and what mathematical, worded and multiple-choice rewards make of them."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rewards.answers import after_thinking, answer_line, final_answers, last_boxed
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


@pytest.mark.parametrize(
    "text", ["answer" + " " * 30_000, "A and " * 5_000, "(" * 30_000, "\n" * 30_000, "not A, " * 5_000]
)
def test_a_response_without_an_answer_is_searched_once(text: str) -> None:
    assert answer_line(text) is None
    assert [one for answers in final_answers(text) for one in answers if "5" in one] == []
    assert choice(text) in {None, "A"}


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


RULES = {"math": Mathematics, "boxed_math": BoxedMathematics, "deepscaler": DeepScaleR, "dapo": Dapo}

STATED = [
    ("math", "0.5", r"so it is \boxed{\frac{1}{2}}", 1.0),
    ("math", "x^2+1", "$1 + x^2$", 1.0),
    ("math", "12", "5 + 7 = 12", 1.0),
    ("math", "12", r"12 would be wrong, \boxed{13}", 0.0),
    ("math", "34", "Answer: **34**", 1.0),
    ("math", "34", "**Answer**: 34", 1.0),
    ("math", "34", "**Answer:** 34", 1.0),
    ("math", "34", "Answer: $34$", 1.0),
    ("math", "34", "Answer: 34.", 1.0),
    ("math", "34", "The final answer is 34.", 1.0),
    ("math", "34", "The final answer is: $34$. I hope it is correct.", 1.0),
    ("math", "34", "He has 12+22 apples.\n#### 34", 1.0),
    ("math", "34", "#### 34 apples", 1.0),
    ("math", "34", "The answer is **34**.", 1.0),
    ("math", "34", "The answer is `34`", 1.0),
    ("math", "34", "Answer:\n34", 1.0),
    ("math", "34", "Answer:\n\n$$34$$", 1.0),
    ("math", "34", "The answer is 34 because 17 * 2 = 34.", 1.0),
    ("math", "17", "The answer is 34 because 17 * 2 = 34.", 0.0),
    ("math", "35", "The answer is 34 because 17 * 2 = 34.", 0.0),
    ("math", "18", "She makes $18 every day.", 1.0),
    ("math", "18", "She pays $20 and gets back $2, so she spends $18.", 1.0),
    ("math", "2", "She pays $20 and gets back $2, so she spends $18.", 0.0),
    ("math", "18", "The answer is $18, since $20 - $2 = $18.", 1.0),
    ("math", "18", r"The answer is \$18.", 1.0),
    ("math", "1800", "That costs $1,800 per year.", 1.0),
    ("math", "1,800", "That costs $1800.", 1.0),
    ("math", "3/4", r"The probability is \frac{3}{4}.", 1.0),
    ("math", "3/4", r"The probability is $\frac{3}{4}$ and not $\frac{1}{4}$.", 0.0),
    ("math", "5", r"\boxed{5}. Remember to write \boxed{ }.", 1.0),
    ("math", "5", r"\boxed{} first. \boxed{5}", 1.0),
    ("math", "5", r"\boxed{4} \boxed{5}", 1.0),
    ("math", "4", r"\boxed{4}, wait, \boxed{5}", 0.0),
    ("math", "2,3", r"\boxed{2} and \boxed{3}", 1.0),
    ("math", "2,3", r"$\boxed{2}$, $\boxed{3}$", 1.0),
    ("math", "3", r"$\boxed{2}$, $\boxed{3}$", 1.0),
    ("math", "4", r"$\boxed{2}$, $\boxed{3}$", 0.0),
    ("math", "1,2", "The solutions are $1$ and $2$.", 1.0),
    ("math", "1,2", "The solutions are $x=1$ and $x=2$.", 1.0),
    ("math", "1", "The solutions are $1$ and $2$.", 0.0),
    ("math", r"28\%", "The answer is $28$ %.", 1.0),
    ("math", r"28\%", "It is 28 percent.", 1.0),
    ("math", r"28\%", "It is 29 percent.", 0.0),
    ("math", "5", r"<think>\boxed{4}</think>The answer is 5.", 1.0),
    ("math", "4", r"<think>\boxed{4}</think>The answer is 5.", 0.0),
    ("math", "5", "<think>maybe 5", 0.0),
    ("math", "5", r"<think>maybe \boxed{5}", 1.0),
    ("math", "5", r"<think>\boxed{5}</think>", 1.0),
    ("math", "yes", "Yes.", 1.0),
    ("math", "yes", "The answer is yes.", 1.0),
    ("math", "yes", "The answer is no.", 0.0),
    ("math", r"\text{Evelyn}", "So the answer is Evelyn.", 1.0),
    ("math", "Paris", "The answer is: **Paris**", 1.0),
    ("math", "C", "The answer is (C).", 1.0),
    ("math", "12", "no idea", 0.0),
    ("math", "12", "", 0.0),
    ("math", "-3", "The result is -3.", 1.0),
    ("math", "3", "The result is -3.", 0.0),
    ("math", "4.5e33", "It is about 4.5e33 erg.", 1.0),
    ("math", "4.5e33", r"It is about $4.5\times 10^{33}$ erg.", 1.0),
    ("math", "0.25", "We get 1/4.", 1.0),
    ("math", "10/9", r"We get \( \frac{10}{9} \).", 1.0),
    ("math", "7", "x = 7", 1.0),
    ("math", "7", "Thus, $x = 7$.", 1.0),
    ("math", "7", "Thus $$x = 7.$$", 1.0),
    ("math", "7", r"\[ x = 7 \]", 1.0),
    ("math", r"\frac{\sqrt{3}}{2}", r"$\sqrt{3}/2$", 1.0),
    ("math", "1000", "The answer is 1,000.", 1.0),
    ("math", "10", "The answer is 10:", 1.0),
    ("math", "50", "Step 1: 2*5 = 10. Step 2: 10*5 = 50", 1.0),
    ("math", "6", "There are 2 * 3 = <<2*3=6>>6 apples.", 1.0),
    ("math", "3.5", "The final answer is 3.5 hours, i.e. 210 minutes.", 1.0),
    ("math", "24", "answer = 24", 1.0),
    ("math", "(1,2)", "The answer is (1, 2).", 1.0),
    ("math", "[0,1)", "The answer is $[0,1)$.", 1.0),
    ("math", "3:2", "The ratio is 3:2.", 1.0),
    ("math", r"\frac{1}{3}", "The answer is 0.333...", 1.0),
    ("math", "0", "The answer is 0.333...", 0.0),
    ("boxed_math", "12", "12", 0.0),
    ("boxed_math", "12", r"\boxed{3 \cdot 4}", 1.0),
    ("boxed_math", "12", r"\boxed{12}\boxed{}", 1.0),
    ("boxed_math", "12", r"\fbox{12}", 1.0),
    ("boxed_math", "12", r"$\boxed{\text{12}}$", 1.0),
    ("boxed_math", "12", r"\boxed{x = 12}", 1.0),
    ("boxed_math", "12", r"\boxed{\$12}", 1.0),
    ("boxed_math", "12", r"\boxed{12 \text{ apples}}", 1.0),
    ("boxed_math", "12", r"\boxed{\textbf{12}}", 1.0),
    ("boxed_math", "12", r"\boxed{$12$}", 1.0),
    ("boxed_math", "12", r"\boxed{ 12. }", 1.0),
    ("deepscaler", "2", r"<think>\boxed{1}</think> \boxed{2} \boxed{}", 1.0),
    ("deepscaler", "2", r"<think>\boxed{2}", 0.0),
    ("dapo", "34", r"Answer: \boxed{34}", 1.0),
    ("dapo", "34", "Answer: x = 34", 1.0),
    ("dapo", r"576\pi", r"Answer: 576\pi\;m^{2}", 1.0),
    ("dapo", r"2\pi", r"Answer: 2\, \pi; I hope so", 1.0),
    ("dapo", r"\frac{x^2}{2}", r"Answer: \int x\, dx; no", 1.0),
    ("dapo", "12345", r"Answer: 12,\! 345", 1.0),
    ("dapo", "34", "Answer: 34 units", 1.0),
    ("dapo", "34", r"Answer: \(34\)", 1.0),
    ("dapo", "34", "answer: 34", 1.0),
    ("dapo", "34", "__Answer__: 34", 1.0),
    ("dapo", "34", "Answer: *34*", 1.0),
    ("dapo", "34", "Answer: ***34***", 1.0),
    ("dapo", "34", 'Answer: "34"', 1.0),
    ("dapo", "34", "Answer: The value is 34.", 1.0),
    ("dapo", "34", "Answer: 34\n", 1.0),
    ("dapo", "34", "Answer:\n\n**34**", 1.0),
    ("dapo", "34", "**Answer:**\n34", 1.0),
    ("dapo", "34", "Final Answer: $34$", 1.0),
    ("dapo", "34", "### Answer: 34", 1.0),
    ("dapo", "34", "Answer: 35", -1.0),
    ("dapo", "34", "Answer: **35**", -1.0),
    ("dapo", "34", "Answer:", -1.0),
    ("dapo", "34", "Answer: ~~34~~", 1.0),
    ("dapo", "34", r"Answer: $\boxed{34}$.", 1.0),
    ("dapo", "34", "Answer: $$34$$", 1.0),
    ("dapo", "34", "Answer : 34", 1.0),
    ("dapo", "34", "Answer: 34 (since 30+4)", 1.0),
    ("dapo", "34", "Answer: 34, because 17*2=34", 1.0),
    ("dapo", r"\frac{1}{2}", "Answer: 1/2", 1.0),
    ("dapo", "34", "Answer: 34 = 2*17", 1.0),
]


@pytest.mark.parametrize(("rule", "label", "response", "expected"), STATED)
async def test_the_answer_that_a_response_states_is_read_whole(
    rule: str, label: str, response: str, expected: float
) -> None:
    reward = await score(RULES[rule], response, label)
    assert (reward["score"] if isinstance(reward, dict) else reward) == expected


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
        ("The correct answer is C, not option A.", "C"),
        ("b. 4", "B"),
        ("(C)", "C"),
        ("**C**", "C"),
        ("option C", "C"),
        ("C)", "C"),
        ("Answer: C", "C"),
        ("c", "C"),
        ("c.", "C"),
        ("(c)", "C"),
        ("A car drives at 5 m/s, so B", "B"),
        ("A car has I think wheels", None),
        ("I would go with D.", "D"),
        ("C. 42", "C"),
        ("C: 42", "C"),
        ("C", "C"),
        ("The answer is C rather than A.", "C"),
        ("The answer is C instead of B or D.", "C"),
        ("It is not A but C.", "C"),
        ("The answer is not A, but D.", "D"),
        ("Option A is wrong; the answer is C.", "C"),
        ("The answer is C. Option A is tempting but wrong.", "C"),
        ("The answer is C. A and B are incorrect.", "C"),
        ("First I thought the answer was B. The answer is C.", "C"),
        ("C is correct.", "C"),
        ("Option D is the correct answer.", "D"),
        ("(B) is the right choice, not (A).", "B"),
        (r"\boxed{\text{C}}", "C"),
        (r"\boxed{\textbf{(D)}}", "D"),
        (r"\boxed{C. 42}", "C"),
        (r"$\boxed{\mathrm{B}}$", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(A)}\ 12}", "A"),
        ("The answer is **(C)**.", "C"),
        ("The answer is: C", "C"),
        ("The final answer is C", "C"),
        ("the answer is c.", "C"),
        ("The answer is (c).", "C"),
        ("answer: b", "B"),
        ("Answer: b. 4", "B"),
        ("Answer: (b) 4", "B"),
        ("The answer is option C, as A and B fail.", "C"),
        ("Therefore, I choose B over C.", "B"),
        ("I pick option A.", "A"),
        ("We can eliminate A and B. Between C and D, C fits.", "C"),
        ("A is wrong, B is wrong, D is wrong. So C.", "C"),
        ("The correct choice is B. This is a common mistake: A.", "B"),
        ("Ruling out A, B and D leaves C", "C"),
        ("It isn't A. It's B.", "B"),
        ("The answer is A.", "A"),
        ("The answer is A", "A"),
        ("A", "A"),
        ("A.", "A"),
        ("a", "A"),
        ("A good answer needs care.", None),
        ("The answer is a good one: D", "D"),
        ("The answer cannot be A, so it must be D.", "D"),
        ("Not B; the correct answer is E.", "E"),
        ("D, not A", "D"),
        ("D (not A)", "D"),
        ("B, since A is not possible.", "B"),
        ("C because option A does not hold.", "C"),
        ("The answer is C.\n\nExplanation: Option A ignores friction. Option B doubles it.", "C"),
        ("A. 3\nB. 4\nC. 5\nThe answer is B", "B"),
        ("Answer: C\nA: wrong sign", "C"),
        ("The correct answer is C, and not A or B.", "C"),
        ("The correct answer is B; A would be wrong.", "B"),
        ("The best option is D, unlike C.", "D"),
        ("The answer is B, not C nor D.", "B"),
        ("None of them", None),
        ("", None),
        ("42", None),
        ("I", None),
        ("Because I am", None),
        ("Answer is C", "C"),
        ("ANSWER: C", "C"),
        ("The Answer Is (D)", "D"),
        ("Final answer: **B**", "B"),
        ("The answer is $C$.", "C"),
        (r"The answer is \(C\).", "C"),
        ("The answer is 'C'.", "C"),
        ('The answer is "C".', "C"),
        ("My choice: E", "E"),
        ("Choice (D) it is", "D"),
        ("Option (b)", "B"),
        ("So the correct answer would be D.", "D"),
        ("Hence, the answer must be A.", "A"),
        ("The right answer is A, because B is not.", "A"),
        ("In conclusion: B is the best answer.", "B"),
        ("B is not correct, C is.", "C"),
        ("The answer is C — not B.", "C"),
        ("The answer isn't B. It is D.", "D"),
        ("I initially considered A, but the answer is B.", "B"),
        ("The answer is B. I initially considered A.", "B"),
        ("The answer: C. A student might think A.", "C"),
        ("Answer: The correct option is C, not A.", "C"),
        ("The correct answer is (A) since I is current", "A"),
        ("Vitamin C is needed, so the answer is B.", "B"),
        ("D. Not A.", "D"),
        ("Both A and B are false, thus D.", "D"),
        ("Neither A nor B; C.", "C"),
        ("Select C", "C"),
        ("The answer is not B", None),
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
    assert "with --label-key" in str(failure.value)


@pytest.mark.parametrize("reward", [Mathematics, BoxedMathematics, DeepScaleR, Dapo, WordOverlap, MultipleChoice])
async def test_a_sample_without_a_label_says_what_to_do(reward: object) -> None:
    with pytest.raises(DataError, match="with --label-key"):
        await score(reward, "Answer: 1 \\boxed{1}</think>\\boxed{1}", None)
