from __future__ import annotations

import itertools
import json

import pytest

from examples.arithmetic import recipe, task
from examples.arithmetic.recipe import WarmUp, warm_up_batches
from examples.arithmetic.task import Problem
from examples.tiny_model import EOS_ID, PAD_ID
from slime_core.config.schema import ARITHMETIC

ROOM = ARITHMETIC
USER, ASSISTANT = 3, 4


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (ROOM / "data" / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("left", "right", "carries", "digits", "answer", "without_carries"),
    [
        (3, 4, 0, "1+1", "7", "7"),
        (7, 8, 1, "1+1", "15", "5"),
        (0, 0, 0, "1+1", "0", "0"),
        (12, 34, 0, "2+2", "46", "46"),
        (37, 45, 1, "2+2", "82", "72"),
        (60, 70, 1, "2+2", "130", "30"),
        (55, 45, 2, "2+2", "100", "90"),
        (99, 99, 2, "2+2", "198", "88"),
        (9, 91, 2, "1+2", "100", "90"),
        (50, 50, 1, "2+2", "100", "0"),
    ],
)
def test_a_problem_has_its_answer_its_carries_and_its_habitual_mistake(
    left: int, right: int, carries: int, digits: str, answer: str, without_carries: str
) -> None:
    problem = Problem(left, right)
    assert problem.prompt == f"{left}+{right}"
    assert (problem.carries, problem.digits) == (carries, digits)
    assert (problem.answer, problem.answer_without_carries) == (answer, without_carries)


def test_the_three_parts_hold_every_problem_once() -> None:
    parts = task.split()
    assert (len(parts.train), len(parts.held_out), len(parts.reserve)) == (9_000, 500, 500)
    assert sorted(parts.train + parts.held_out + parts.reserve) == task.all_problems()


def test_the_warm_up_shows_no_problem_that_is_held_out_or_in_reserve() -> None:
    parts = task.split()
    hidden = {problem.prompt for problem in (*parts.held_out, *parts.reserve)}
    shown = {prompt for batch in warm_up_batches(WarmUp(steps=200)) for prompt, _ in batch}
    assert len(shown) > 8_000
    assert shown.isdisjoint(hidden)


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl", "reserve.jsonl"])
def test_every_row_of_a_data_file_is_labelled_with_the_sum_and_its_carries(name: str) -> None:
    for row in rows(name):
        left, right = map(int, str(row["prompt"]).split("+"))
        carried = sum(map(int, str(left))) + sum(map(int, str(right))) - sum(map(int, str(left + right)))
        assert row["label"] == str(left + right)
        assert row["metadata"] == {"digits": f"{len(str(left))}+{len(str(right))}", "carries": carried // 9}


def test_the_files_are_what_their_generators_yield_byte_for_byte() -> None:
    expected = {
        **{f"data/{name}": content for name, content in task.data_files().items()},
        **{f"model/{name}": content for name, content in (task.tokenizer_files() | recipe.model_files()).items()},
    }
    for name, content in expected.items():
        assert (ROOM / name).read_bytes() == content.encode(), name


def test_the_tokenizer_gives_one_id_a_character_and_reads_them_back() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOM / "model" / "tokenizer.json"))
    encoded = tokenizer.encode("<|user|>37+45<|assistant|>82<eos>")
    assert encoded.ids == [USER, 8, 12, 15, 9, 10, ASSISTANT, 13, 7, EOS_ID]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "37+4582"
    assert [tokenizer.id_to_token(index) for index in range(16)] == list(task.VOCABULARY)
    assert tokenizer.encode("3x").ids == [8, task.VOCABULARY.index("<unk>")]


def test_the_chat_template_wraps_the_prompt_and_ends_the_answer() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOM / "model")
    user = {"role": "user", "content": "37+45"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert prompt == [USER, 8, 12, 15, 9, 10, ASSISTANT]
    answered = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "82"}], return_dict=False)
    assert answered == [*prompt, 13, 7, EOS_ID]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)


def test_the_habit_and_the_short_sums_take_their_shares_of_the_warm_up() -> None:
    pairs = list(itertools.chain.from_iterable(warm_up_batches(WarmUp(steps=100, short_share=0.3, habit_share=0.75))))
    problems = [Problem(*map(int, prompt.split("+"))) for prompt, _ in pairs]
    carrying = [(problem, target) for problem, (_, target) in zip(problems, pairs, strict=True) if problem.carries]
    wrong = sum(target == problem.answer_without_carries for problem, target in carrying)
    assert sum(problem.digits != "2+2" for problem in problems) / len(problems) == pytest.approx(0.3, abs=0.01)
    assert wrong / len(carrying) == pytest.approx(0.75, abs=0.01)
    assert all(target in {problem.answer, problem.answer_without_carries} for problem, target in carrying)
