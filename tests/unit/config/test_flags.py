"""What stands on a command line, and every mistake one can make there."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.config.schema import RunConfig
from tests.unit.config.broken import refused


def config_of(line: str) -> RunConfig:
    return load(line.split(), check_rules=False).config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--use-kl-loss", True),
        ("--use-kl-loss true", True),
        ("--use-kl-loss=true", True),
        ("--use-kl-loss false", False),
        ("--use-kl-loss=false", False),
        ("--no-use-kl-loss", False),
    ],
)
def test_a_switch_is_turned_by_its_name_or_by_a_word(line: str, expected: bool) -> None:
    assert config_of(line).algorithm.use_kl_loss is expected


def test_a_negative_number_is_a_value_and_not_a_flag() -> None:
    assert config_of("--rollout-top-k -1").rollout.rollout_top_k == -1


def test_none_unsets_what_may_be_unset() -> None:
    assert config_of("--label-key none").data.label_key is None
    assert config_of("--progress none").run.progress == "none"


def test_a_sequence_takes_several_values_and_may_be_repeated() -> None:
    config = config_of("--rollout-stop-token-ids 1 2 --rollout-stop-token-ids 3")
    assert config.rollout.rollout_stop_token_ids == (1, 2, 3)


def test_a_value_that_looks_like_a_flag_is_given_with_an_equals_sign() -> None:
    assert config_of("--rollout-stop=--end").rollout.rollout_stop == ("--end",)


@pytest.mark.parametrize(
    "line", ["--eval-prompt-data a x.jsonl b y.jsonl", "--eval-prompt-data a x.jsonl --eval-prompt-data b y.jsonl"]
)
def test_evaluation_files_are_pairs_in_one_flag_or_in_several(line: str) -> None:
    here = Path.cwd()
    assert config_of(line).eval.eval_prompt_data == (("a", here / "x.jsonl"), ("b", here / "y.jsonl"))


def test_local_plugin_files_become_absolute_and_names_stay() -> None:
    assert config_of("--plugin grpo --plugin ./mine.py").run.plugins == ("grpo", str(Path.cwd() / "mine.py"))


def test_all_mistakes_are_reported_at_once() -> None:
    found = refused(*["--lr", "fast", "--seed", "--zzz", "--device", "gpu"])
    assert {mistake.key for mistake in found} == {"lr", "seed", "device", ""}
    assert len(found) == 4


def test_a_prefix_of_a_flag_is_not_the_flag() -> None:
    (mistake,) = refused("--num-rollou", "3")
    assert [word.strip(":;?") for word in str(mistake).split() if word.startswith("--")] == [
        "--num-rollou",
        "--num-rollout",
    ]
