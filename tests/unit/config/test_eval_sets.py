"""Evaluation sets: where each setting comes from, and what is wrong with a table, a file, or several together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, EvalSet, eval_sets
from slime_core.errors import ConfigError

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


def broken(line: str, *more: str) -> list[str]:
    config = load([*NONE.split(), *line.split(), *more], check_rules=False).config
    return [one.message for one in mistakes(config, purpose="eval")]


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, check_rules=False)
    (line,) = str(caught.value).splitlines()[1:-1]
    return line.removeprefix("  - ")


def test_a_setting_is_the_set_s_own_then_that_of_evaluations_then_the_run_s(folder: Path) -> None:
    found = sets(
        *("--eval-prompt-data", "plain", "gpqa.jsonl", "--eval-datasets", "name='aime', path='aime.jsonl', top_k=5"),
        *("--eval-temperature", "0.6", "--eval-top-p", "0.9", "--rollout-top-p", "0.8", "--rollout-top-k", "7"),
        *(
            "--rollout-stop",
            "X",
            "--eval-label-key",
            "answer",
            "--reward-key",
            "acc",
            "--rollout-max-response-len",
            "9",
        ),
    )
    aime, plain = found["aime"], found["plain"]
    assert (aime.path, plain.path) == (folder / "aime.jsonl", folder / "gpqa.jsonl")
    assert (aime.temperature, aime.top_p, aime.top_k) == (0.6, 0.9, 5)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.6, 0.9, 7)
    assert (aime.label_key, aime.reward_key, aime.stop, aime.max_response_len) == ("answer", "acc", ("X",), 9)


def test_a_greedy_set_has_nothing_to_choose_from_and_none_takes_a_key_away(folder: Path) -> None:
    one = sets(
        *("--eval-datasets", "name='a', path='aime.jsonl', temperature=0, reward_key='none', stop=[]"),
        *("--eval-temperature", "1", "--rollout-top-p", "0.8", "--reward-key", "acc", "--rollout-stop", "X"),
    )["a"]
    assert (one.temperature, one.top_p, one.top_k, one.reward_key, one.stop) == (0.0, 1.0, -1, None, ())


def test_the_longest_prompt_leaves_room_for_a_token(folder: Path) -> None:
    table = "name='a', path='aime.jsonl', max_context_len=20"
    assert sets("--eval-datasets", table)["a"].longest_prompt == 19
    assert sets("--eval-datasets", f"{table}, max_prompt_len=7")["a"].longest_prompt == 7
    assert sets("--eval-prompt-data", "a", "aime.jsonl")["a"].longest_prompt is None


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("name='a', path='x', temprature=1", "table 1 temprature: found 1, extra inputs are not permitted"),
        ("name='a'", "table 1 path: field required"),
        (
            "name='a', path='x', top_p='5', n_samples_per_eval_prompt=0",
            "table 1 n_samples_per_eval_prompt: found 0, input should be greater than or equal to 1; table 1 top_p: "
            "found '5', input should be a valid number",
        ),
    ],
)
def test_a_wrong_table_is_reported(table: str, expected: str, folder: Path) -> None:
    assert refused("--eval-datasets", table).startswith(
        f"--eval-datasets: {expected}; accepted: tables with name, path, "
    )
    (folder / "run.toml").write_text(f"[eval]\neval_datasets = [{{ {table} }}]\n")
    assert refused("--config", "run.toml").startswith(f"run.toml:2 [eval] eval_datasets: {expected}; accepted: ")


@pytest.mark.parametrize(
    ("table", "line", "expected"),
    [
        (
            "name='a', path='aime.jsonl', max_response_len=128",
            "",
            "evaluation set a: max_response_len = 128, but the model reads at most max_position_embeddings = 128 "
            "tokens, prompt and response together; give at most 127",
        ),
        (
            "name='a', path='aime.jsonl', max_context_len=129",
            "",
            "evaluation set a: max_context_len = 129, but the model reads at most max_position_embeddings = 128 "
            "tokens, prompt and response together; give at most 128",
        ),
        (
            "name='a', path='aime.jsonl', max_response_len=4",
            "--eval-min-new-tokens 5",
            "evaluation set a: min_new_tokens = 5 is above the longest response, max_response_len = 4; give at most 4",
        ),
        (
            "name='a', path='aime.jsonl', model='models/judge'",
            "",
            "evaluation set a: model = 'models/judge'; accepted: an auxiliary model of the run (there are: none), or "
            "the address of an SGLang server, such as http://127.0.0.1:30000",
        ),
        (
            "name='a', path='aime.jsonl', model='http://judge:1', model_key_env='sk-1234'",
            "",
            "evaluation set a: model_key_env names no environment variable that holds a key, which is one line of "
            "ASCII without spaces; give the name, such as JUDGE_KEY, and export it before the run",
        ),
        (
            "name='a', path='aime.jsonl', model='http://judge:1', model_key_env='NOT_SET_HERE'",
            "",
            "evaluation set a: model_key_env names no environment variable that holds a key, which is one line of ",
        ),
        (
            "name='a', path='aime.jsonl', model='judge'",
            "",
            "evaluation set a: model = 'judge'; accepted: an auxiliary model of the run (there are: none), or ",
        ),
        ("name='a', path='missing.jsonl'", "", "eval_prompt_data a: "),
    ],
)
def test_sets_that_cannot_be_measured_are_refused(table: str, line: str, expected: str, folder: Path) -> None:
    (message,) = broken(line, "--eval-datasets", table)
    assert message.startswith(expected)


def test_names_differ_over_both_kinds_of_sets(folder: Path) -> None:
    argv = ["--eval-prompt-data", "a", "aime.jsonl", "--eval-datasets", "name='a', path='gpqa.jsonl'"]
    (one,) = mistakes(load(argv, check_rules=False).config, purpose="eval")
    assert one.message == "evaluation sets: 2 are named 'a'; give each its own name"


def test_sets_with_settings_are_something_to_evaluate_on(folder: Path) -> None:
    table = "name='a', path='aime.jsonl'"
    model = f"--hf-checkpoint {ARITHMETIC / 'model'} --rollout-max-response-len 8"
    assert broken(model, "--eval-datasets", table) == []
    assert broken(model) == ["eval_prompt_data: there is nothing to evaluate on; add --eval-prompt-data NAME FILE"]
