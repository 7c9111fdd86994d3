from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections import Counter

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
def test_a_problem_knows_its_answer_its_carries_and_its_habitual_mistake(
    left: int, right: int, carries: int, digits: str, answer: str, without_carries: str
) -> None:
    problem = Problem(left, right)
    assert problem.prompt == f"{left}+{right}"
    assert (problem.carries, problem.digits) == (carries, digits)
    assert (problem.answer, problem.answer_without_carries) == (answer, without_carries)


def test_the_habit_is_wrong_exactly_where_something_is_carried() -> None:
    for problem in task.all_problems():
        assert (problem.answer_without_carries != problem.answer) == (problem.carries > 0)


def test_the_three_parts_hold_every_problem_once() -> None:
    parts = task.split()
    assert (len(parts.train), len(parts.held_out), len(parts.reserve)) == (9_000, 500, 500)
    assert sorted(parts.train + parts.held_out + parts.reserve) == task.all_problems()


def test_a_sum_and_its_mirror_image_are_in_the_same_part() -> None:
    for part in dataclasses.astuple(task.split()):
        members = set(part)
        assert {(right, left) for left, right in members} == members


def test_the_warm_up_shows_no_problem_that_is_held_out_or_in_reserve() -> None:
    parts = task.split()
    hidden = {problem.prompt for problem in (*parts.held_out, *parts.reserve)}
    shown = {prompt for batch in warm_up_batches(WarmUp(steps=200)) for prompt, _ in batch}
    assert len(shown) > 8_000
    assert shown.isdisjoint(hidden)


def test_held_out_and_reserve_have_the_same_mix_of_difficulties() -> None:
    parts = task.split()
    held_out, reserve = (
        Counter((problem.digits, problem.carries) for problem in part) for part in (parts.held_out, parts.reserve)
    )
    assert held_out == reserve
    assert held_out["1+1", 0] == held_out["1+1", 1] == 10
    assert held_out["2+2", 1] == 178


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


def test_the_data_stays_under_a_megabyte_and_the_checkpoint_under_four() -> None:
    assert sum(path.stat().st_size for path in (ROOM / "data").iterdir()) < 1_000_000
    assert sum(path.stat().st_size for path in (ROOM / "model").iterdir()) < 4_000_000


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
    whole = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "82"}], return_dict=False)
    assert whole == [*prompt, 13, 7, EOS_ID]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)


def test_the_checkpoint_holds_the_tensors_that_its_configuration_describes() -> None:
    from safetensors import safe_open

    with safe_open(ROOM / "model" / "model.safetensors", framework="np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        kinds = {weights.get_slice(name).get_dtype() for name in shapes}
    assert kinds == {"F32"}
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == [16, 64]
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == [32, 64]
    assert sum(math.prod(shape) for shape in shapes.values()) == 113_184


def test_the_same_warm_up_yields_the_same_batches_and_another_seed_others() -> None:
    first, again, other = (list(warm_up_batches(WarmUp(steps=3, seed=seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert [len(batch) for batch in first] == [256, 256, 256]


def test_the_habit_and_the_short_sums_take_their_shares_of_the_warm_up() -> None:
    pairs = list(itertools.chain.from_iterable(warm_up_batches(WarmUp(steps=100, short_share=0.3, habit_share=0.75))))
    problems = [Problem(*map(int, prompt.split("+"))) for prompt, _ in pairs]
    carrying = [(problem, target) for problem, (_, target) in zip(problems, pairs, strict=True) if problem.carries]
    wrong = sum(target == problem.answer_without_carries for problem, target in carrying)
    assert sum(problem.digits != "2+2" for problem in problems) / len(problems) == pytest.approx(0.3, abs=0.01)
    assert wrong / len(carrying) == pytest.approx(0.75, abs=0.01)
    assert all(target in {problem.answer, problem.answer_without_carries} for problem, target in carrying)


def test_the_learning_rate_rises_for_fifty_steps_and_falls_to_zero() -> None:
    warm_up = WarmUp(steps=1_000, lr=0.004, lr_warmup_steps=50)
    assert warm_up.learning_rate(0) == pytest.approx(0.004 / 50)
    assert warm_up.learning_rate(500) == pytest.approx(0.002)
    assert warm_up.learning_rate(1_000) == pytest.approx(0.0, abs=1e-12)


def test_task_and_recipe_import_nothing_heavy() -> None:
    code = (
        "import sys, examples.arithmetic.recipe;"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
