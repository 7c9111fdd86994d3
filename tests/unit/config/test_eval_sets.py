"""Evaluation sets: where each setting comes from, and what is wrong with a table, a file, or several together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.config.schema import EvalSet, eval_sets
from slime_core.errors import Mistake
from tests.unit.config.broken import blames, refused

NONE = "--eval-prompt-data none"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two prompt files."""
    for name in ("aime.jsonl", "gpqa.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1+1", "label": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sets(*argv: str) -> dict[str, EvalSet]:
    return {one.name: one for one in eval_sets(load(argv, check_rules=False).config)}


def broken(line: str, *more: str) -> list[Mistake]:
    return mistakes(load([*NONE.split(), *line.split(), *more], check_rules=False).config, purpose="eval")


def test_a_setting_is_the_set_s_own_then_that_of_evaluations_then_the_run_s(folder: Path) -> None:
    found = sets(
        *("--eval-prompt-data", "plain", "gpqa.jsonl", "--eval-datasets", "name='aime', path='aime.jsonl', top_k=5"),
        *("--eval-temperature", "0.6", "--eval-top-p", "0.9", "--rollout-top-p", "0.8", "--rollout-top-k", "7"),
        *("--rollout-stop", "X", "--eval-label-key", "answer", "--reward-key", "acc"),
        *("--rollout-max-response-len", "9"),
    )
    aime, plain = found["aime"], found["plain"]
    assert (aime.path, plain.path) == (folder / "aime.jsonl", folder / "gpqa.jsonl")
    assert (aime.temperature, aime.top_p, aime.top_k) == (0.6, 0.9, 5)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.6, 0.9, 7)
    assert (aime.label_key, aime.reward_key, aime.stop, aime.max_response_len) == ("answer", "acc", ("X",), 9)


def test_the_longest_prompt_leaves_room_for_a_token(folder: Path) -> None:
    table = "name='a', path='aime.jsonl', max_context_len=20"
    assert sets("--eval-datasets", table)["a"].longest_prompt == 19
    assert sets("--eval-datasets", f"{table}, max_prompt_len=7")["a"].longest_prompt == 7
    assert sets("--eval-prompt-data", "a", "aime.jsonl")["a"].longest_prompt is None


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ("name='a', path='x', temprature=1", ["temprature: found 1"]),
        ("name='a'", ["path: "]),
        (
            "name='a', path='x', top_p='5', n_samples_per_eval_prompt=0",
            ["n_samples_per_eval_prompt: ", "top_p: found '5'"],
        ),
    ],
)
def test_a_wrong_table_is_reported(table: str, fields: list[str], folder: Path) -> None:
    names = [f"table 1 {field}" for field in fields]
    blames(refused("--eval-datasets", table), "eval_datasets", "--eval-datasets: ", *names)
    (folder / "run.toml").write_text(f"[eval]\neval_datasets = [{{ {table} }}]\n")
    blames(refused("--config", "run.toml"), "eval_datasets", "run.toml:2 [eval] eval_datasets: ", *names)


@pytest.mark.parametrize(
    ("of_set", "line", "key", "numbers"),
    [
        ("max_response_len=128", "", "max_response_len = 128,", ["max_position_embeddings = 128", "127"]),
        ("max_context_len=129", "", "max_context_len = 129,", ["max_position_embeddings = 128", "128"]),
        ("max_response_len=4", "--eval-min-new-tokens 5", "min_new_tokens = 5", ["max_response_len = 4"]),
        ("model='models/judge'", "", "model = 'models/judge'", ["http://"]),
        ("model='judge'", "", "model = 'judge'", ["http://"]),
        ("model='http://judge:1', model_key_env='sk-1234'", "", "model_key_env", ["JUDGE_KEY"]),
        ("model='http://judge:1', model_key_env='NOT_SET_HERE'", "", "model_key_env", ["JUDGE_KEY"]),
    ],
)
def test_sets_that_cannot_be_measured_are_refused(
    of_set: str, line: str, key: str, numbers: list[str], folder: Path
) -> None:
    (mistake,) = broken(line, "--eval-datasets", f"name='a', path='aime.jsonl', {of_set}")
    assert mistake.message.startswith(f"evaluation set a: {key}")
    assert [number for number in numbers if number not in mistake.message] == []
    assert "sk-1234" not in mistake.message


@pytest.mark.parametrize("second", ["--eval-datasets name='a',path='gpqa.jsonl'", "--eval-prompt-data a gpqa.jsonl"])
def test_names_differ_over_both_kinds_of_sets(second: str, folder: Path) -> None:
    config = load(["--eval-prompt-data", "a", "aime.jsonl", *second.split()], check_rules=False).config
    (mistake,) = mistakes(config, purpose="eval")
    assert mistake.message.startswith("evaluation sets: 2 ")
    assert "'a'" in mistake.message


def test_a_greedy_set_has_nothing_to_choose_from_and_none_takes_a_key_away(folder: Path) -> None:
    one = sets(
        *("--eval-datasets", "name='a', path='aime.jsonl', temperature=0, reward_key='none', stop=[]"),
        *("--eval-temperature", "1", "--rollout-top-p", "0.8", "--reward-key", "acc", "--rollout-stop", "X"),
    )["a"]
    assert (one.temperature, one.top_p, one.top_k, one.reward_key, one.stop) == (0.0, 1.0, -1, None, ())
