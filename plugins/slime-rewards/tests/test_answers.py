"""Where answers stand, and the rewards for mathematics, words and multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rewards.answers import after_thinking, answer_line, final_answers, last_boxed
from slime_rewards.mathematics import BoxedMathematics, Dapo, DeepScaleR, Mathematics
from slime_rewards.texts import MultipleChoice, WordOverlap, choice, word_f1


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        ("none", None),
        (r"\fbox{3} } {", "3"),
        (r"\boxed{\left\{ x \right.} done", r"\left\{ x \right."),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{2} \boxed{" + "{" * 10, "2"),
        pytest.param(r"\boxed{" * 30_000, None, id="thousands that never close"),
    ],
)
def test_the_last_complete_box_counts_with_its_braces_balanced(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


@pytest.mark.parametrize(
    "part", ["answer" + " " * 30_000, "A and " * 5_000, "(" * 30_000, "\n" * 30_000, "not A, " * 5_000]
)
def test_a_response_without_an_answer_is_searched_once(part: str) -> None:
    assert answer_line(part) is None
    assert [answer for answers in final_answers(part) for answer in answers if "5" in answer] == []
    assert choice(part) in {None, "A"}


def test_thinking_that_was_not_ended_has_no_answer() -> None:
    assert after_thinking("<think>a</think>b</think> c") == " c"
    assert after_thinking("<think>a") is None


def test_the_last_answer_line_counts() -> None:
    assert answer_line("Answer: 3\nmore\n **Answer:** 4 \nend") == "4"
    assert answer_line("the answer: none of a line's start") is None
    starts = ("# Answer", "- answer", "Final answer", "> **Final Answer**")
    assert [answer_line(f"{start}: 4") for start in starts] == ["4"] * 4


async def score(reward: Any, label: Any, *responses: str) -> Sequence[Any]:
    return list(await reward().score([Sample(response=response, label=label) for response in responses]))


RULES = {"math": Mathematics, "boxed_math": BoxedMathematics, "deepscaler": DeepScaleR, "dapo": Dapo}

STATED = [
    ("math", "0.5", [r"so it is \boxed{\frac{1}{2}}"], []),
    ("math", "x^2+1", ["$1 + x^2$"], []),
    ("math", "12", ["5 + 7 = 12"], [r"12 would be wrong, \boxed{13}", "no idea", ""]),
    ("math", "34", ["Answer: **34**", "**Answer**: 34", "**Answer:** 34", "Answer: $34$", "Answer: 34.",
     "The final answer is 34.", "The final answer is: $34$. I hope it is correct.", "He has 12+22 apples.\n#### 34",
     "#### 34 apples", "The answer is **34**.", "The answer is `34`", "Answer:\n34", "Answer:\n\n$$34$$",
     "The answer is 34 because 17 * 2 = 34."], []),
    ("math", "17", [], ["The answer is 34 because 17 * 2 = 34."]),
    ("math", "35", [], ["The answer is 34 because 17 * 2 = 34."]),
    ("math", "18", ["She makes $18 every day.", "She pays $20 and gets back $2, so she spends $18.",
     "The answer is $18, since $20 - $2 = $18.", r"The answer is \$18."], []),
    ("math", "2", [], ["She pays $20 and gets back $2, so she spends $18."]),
    ("math", "1800", ["That costs $1,800 per year."], []),
    ("math", "1,800", ["That costs $1800."], []),
    ("math", "3/4", [r"The probability is \frac{3}{4}."], [r"The probability is $\frac{3}{4}$ and not $\frac{1}{4}$."]),
    ("math", "5", [r"\boxed{5}. Remember to write \boxed{ }.", r"\boxed{} first. \boxed{5}", r"\boxed{4} \boxed{5}",
     r"<think>\boxed{4}</think>The answer is 5.", r"<think>maybe \boxed{5}", r"<think>\boxed{5}</think>"],
     ["<think>maybe 5"]),
    ("math", "4", [], [r"\boxed{4}, wait, \boxed{5}", r"$\boxed{2}$, $\boxed{3}$",
     r"<think>\boxed{4}</think>The answer is 5."]),
    ("math", "2,3", [r"\boxed{2} and \boxed{3}", r"$\boxed{2}$, $\boxed{3}$"], []),
    ("math", "3", [r"$\boxed{2}$, $\boxed{3}$"], ["The result is -3."]),
    ("math", "1,2", ["The solutions are $1$ and $2$.", "The solutions are $x=1$ and $x=2$."], []),
    ("math", "1", [], ["The solutions are $1$ and $2$."]),
    ("math", r"28\%", ["The answer is $28$ %.", "It is 28 percent."], ["It is 29 percent."]),
    ("math", "yes", ["Yes.", "The answer is yes."], ["The answer is no."]),
    ("math", r"\text{Evelyn}", ["So the answer is Evelyn."], []),
    ("math", "Paris", ["The answer is: **Paris**"], []),
    ("math", "C", ["The answer is (C)."], []),
    ("math", "-3", ["The result is -3."], []),
    ("math", "4.5e33", ["It is about 4.5e33 erg.", r"It is about $4.5\times 10^{33}$ erg."], []),
    ("math", "0.25", ["We get 1/4."], []),
    ("math", "10/9", [r"We get \( \frac{10}{9} \)."], []),
    ("math", "7", ["x = 7", "Thus, $x = 7$.", "Thus $$x = 7.$$", r"\[ x = 7 \]"], []),
    ("math", r"\frac{\sqrt{3}}{2}", [r"$\sqrt{3}/2$"], []),
    ("math", "1000", ["The answer is 1,000."], []),
    ("math", "10", ["The answer is 10:"], []),
    ("math", "50", ["Step 1: 2*5 = 10. Step 2: 10*5 = 50"], []),
    ("math", "6", ["There are 2 * 3 = <<2*3=6>>6 apples."], []),
    ("math", "3.5", ["The final answer is 3.5 hours, i.e. 210 minutes."], []),
    ("math", "24", ["answer = 24"], []),
    ("math", "(1,2)", ["The answer is (1, 2)."], []),
    ("math", "[0,1)", ["The answer is $[0,1)$."], []),
    ("math", "3:2", ["The ratio is 3:2."], []),
    ("math", r"\frac{1}{3}", ["The answer is 0.333..."], []),
    ("math", "0", [], ["The answer is 0.333..."]),
    ("math", "He has 48/2 = <<48/2=24>>24 clips.\n#### 1,072", [r"\boxed{1072}", "#### 1072"], [r"\boxed{24}"]),
    ("boxed_math", "so\n#### 72", [r"\boxed{72}"], [r"\boxed{so}"]),
    ("boxed_math", "12", [r"\boxed{3 \cdot 4}", r"\boxed{12}\boxed{}", r"\fbox{12}", r"$\boxed{\text{12}}$",
     r"\boxed{x = 12}", r"\boxed{\$12}", r"\boxed{12 \text{ apples}}", r"\boxed{\textbf{12}}", r"\boxed{$12$}",
     r"\boxed{ 12. }"], ["12"]),
    ("deepscaler", "2", [r"<think>\boxed{1}</think> \boxed{2} \boxed{}",
     r"\boxed{1} ###Response: \boxed{2}", r"<think>###Response \boxed{1}</think> \boxed{2}"], [r"<think>\boxed{2}"]),
    ("dapo", "34", [r"Answer: \boxed{34}", "Answer: x = 34", "Answer: 34 units", r"Answer: \(34\)", "answer: 34",
     "__Answer__: 34", "Answer: *34*", "Answer: ***34***", 'Answer: "34"', "Answer: The value is 34.", "Answer: 34\n",
     "Answer:\n\n**34**", "**Answer:**\n34", "Final Answer: $34$", "### Answer: 34", "Answer: ~~34~~",
     r"Answer: $\boxed{34}$.", "Answer: $$34$$", "Answer : 34", "Answer: 34 (since 30+4)",
     "Answer: 34, because 17*2=34", "Answer: 34 = 2*17"], ["Answer: 35", "Answer: **35**", "Answer:"]),
    ("dapo", r"576\pi", [r"Answer: 576\pi\;m^{2}"], []),
    ("dapo", r"2\pi", [r"Answer: 2\, \pi; I hope so"], []),
    ("dapo", r"\frac{x^2}{2}", [r"Answer: \int x\, dx; no"], []),
    ("dapo", "12345", [r"Answer: 12,\! 345"], []),
    ("dapo", r"\frac{1}{2}", ["Answer: 1/2"], []),
]  # fmt: skip
"""Reward model, label, responses whose answer equals it, and responses whose answer does not."""


@pytest.mark.parametrize(("rule", "label", "right", "wrong"), STATED)
async def test_the_answer_that_a_response_states_is_read_whole(
    rule: str, label: str, right: list[str], wrong: list[str]
) -> None:
    rewards = await score(RULES[rule], label, *right, *wrong)
    if rule == "dapo":
        assert [reward["acc"] for reward in rewards] == [float(reward["score"] == 1.0) for reward in rewards]
        rewards = [(reward["score"] + 1) / 2 for reward in rewards]
    expected = {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}
    assert dict(zip([*right, *wrong], rewards, strict=True)) == expected


async def test_dapo_names_its_two_numbers() -> None:
    assert await score(Dapo, "34", "work\nAnswer: 34", "34") == [
        {"score": 1.0, "acc": 1.0},
        {"score": -1.0, "acc": 0.0},
    ]


async def test_a_label_may_be_a_number() -> None:
    assert [await score(reward, 4, "4") for reward in (Mathematics, WordOverlap)] == [[1.0], [1.0]]


async def test_word_f1_by_hand() -> None:
    # Two of three words against two of two: precision 2/3, recall 1.
    assert word_f1("The old, Eiffel tower!", "eiffel tower") == pytest.approx(0.8)
    assert word_f1("tower eiffel", "eiffel tower") == 1.0
    assert word_f1("x", "y") == 0.0
    assert (word_f1("the", ""), word_f1("", "x")) == (1.0, 0.0)
    assert await score(WordOverlap, "Paris", "paris france", "x") == pytest.approx([2 / 3, 0])


CHOICES: dict[str | None, list[str]] = {
    "A": ["Answer: A", "Answer: A, not B", "Answer: A) the first, not B", "Answer: **A**", "Answer: A\nB is wrong",
        "The answer is A because B is wrong", "The answer is A - B is wrong", r"\boxed{\text{(A)}\ 12}",
        "I pick option A.", "The answer is A.", "The answer is A", "A", "A.", "a", "Hence, the answer must be A.",
        "The right answer is A, because B is not.", "The correct answer is (A) since I is current"],
    "B": [r"not A, \boxed{(b)}", "I think the answer is (B) because A is wrong", "Between A and B I take B",
        "Answer: I think it is (B)", "b. 4", "A car drives at 5 m/s, so B", "(B) is the right choice, not (A).",
        r"$\boxed{\mathrm{B}}$", r"\boxed{b}", "answer: b", "Answer: b. 4", "Answer: (b) 4",
        "Therefore, I choose B over C.", "The correct choice is B. This is a common mistake: A.", "It isn't A. It's B.",
        "B, since A is not possible.", "A. 3\nB. 4\nC. 5\nThe answer is B",
        "The correct answer is B; A would be wrong.", "The answer is B, not C nor D.", "Final answer: **B**",
        "Option (b)", "In conclusion: B is the best answer.", "I initially considered A, but the answer is B.",
        "The answer is B. I initially considered A.", "Vitamin C is needed, so the answer is B."],
    "C": [r"\boxed{C}", "The correct option is **c**.", "<think>the answer is A</think> C",
        "Answer: A careful look shows C", "Answer: C because B is wrong", "A careful answer: I would say C",
        "The correct answer is C, not option A.", "(C)", "**C**", "option C", "C)", "Answer: C", "c", "c.", "(c)",
        "C. 42", "C: 42", "C", "The answer is C rather than A.", "The answer is C instead of B or D.",
        "It is not A but C.", "Option A is wrong; the answer is C.", "The answer is C. Option A is tempting but wrong.",
        "The answer is C. A and B are incorrect.", "First I thought the answer was B. The answer is C.",
        "C is correct.", r"\boxed{\text{C}}", r"\boxed{C. 42}", "The answer is **(C)**.", "The answer is: C",
        "The final answer is C", "the answer is c.", "The answer is (c).", "The answer is option C, as A and B fail.",
        "We can eliminate A and B. Between C and D, C fits.", "A is wrong, B is wrong, D is wrong. So C.",
        "Ruling out A, B and D leaves C", "C because option A does not hold.",
        "The answer is C.\n\nExplanation: Option A ignores friction. Option B doubles it.", "Answer: C\nA: wrong sign",
        "The correct answer is C, and not A or B.", "Answer is C", "ANSWER: C", "The answer is $C$.",
        r"The answer is \(C\).", "The answer is 'C'.", 'The answer is "C".', "B is not correct, C is.",
        "The answer is C — not B.", "The answer: C. A student might think A.",
        "Answer: The correct option is C, not A.", "Neither A nor B; C.", "Select C"],
    "D": ["Answer: a cat, so D", "Answer: D", "Answer: I'm sure that it is D", "I would go with D.",
        "The answer is not A, but D.", "Option D is the correct answer.", r"\boxed{\textbf{(D)}}",
        "The answer is a good one: D", "The answer cannot be A, so it must be D.", "D, not A", "D (not A)",
        "The best option is D, unlike C.", "The Answer Is (D)", "Choice (D) it is", "So the correct answer would be D.",
        "The answer isn't B. It is D.", "D. Not A.", "Both A and B are false, thus D."],
    "E": ["Not B; the correct answer is E.", "My choice: E"],
    "I": ["Answer: I", "Answer: (I) the last", "The answer is I."],
    None: ["I am lost", "A car has I think wheels", "A good answer needs care.", "None of them", "", "42", "I",
        "Because I am", "The answer is not B"],
}  # fmt: skip
"""Letter -> texts that choose it."""


@pytest.mark.parametrize("letter", CHOICES)
def test_the_choice_that_a_text_settles_on(letter: str | None) -> None:
    assert {text: choice(text) for text in CHOICES[letter]} == dict.fromkeys(CHOICES[letter], letter)


async def test_multiple_choice_compares_letters() -> None:
    assert [await score(MultipleChoice, label, "Answer: B") for label in ("(b)", "C")] == [[1.0], [0.0]]
    assert choice("answer" + " " * 100_000) is None


@pytest.mark.parametrize(
    ("reward", "label"),
    [
        *((MultipleChoice, label) for label in ("1", "Paris", "AB", "")),
        *((reward, None) for reward in (*RULES.values(), WordOverlap, MultipleChoice)),
    ],
)
async def test_a_label_that_is_missing_or_no_letter_is_refused(reward: object, label: str | None) -> None:
    with pytest.raises(DataError, match="--label-key"):
        await score(reward, label, "Answer: B \\boxed{1}</think>\\boxed{1}")
