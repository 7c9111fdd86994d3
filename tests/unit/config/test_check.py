"""The rules between settings: each broken once, and silent where its settings were broken before."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.errors import ConfigError


def broken_rules(line: str, **options: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config, **options)]  # type: ignore[arg-type]


def test_the_embedded_run_breaks_no_rule() -> None:
    assert broken_rules("") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": "Qwen3ForCausalLM"}', "names no architecture"),
    ],
)
def test_a_config_json_that_names_no_architecture_is_a_mistake(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (message,) = broken_rules(f"--hf-checkpoint {tmp_path}")
    assert message.startswith(
        f"hf_checkpoint: {tmp_path} holds a config.json that {found}; accepted: a Hugging Face folder"
    )


@pytest.mark.parametrize(
    "more", ["", ', "max_position_embeddings": null', ', "max_position_embeddings": 8, "rope_scaling": {"factor": 4}']
)
def test_any_length_is_accepted_where_the_context_length_is_unknown(more: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["Qwen3ForCausalLM"]{more}}}')
    assert broken_rules(f"--hf-checkpoint {tmp_path} --rollout-max-response-len 5000") == []


@pytest.mark.parametrize(("line", "count"), [("", 1), ("--eval-max-response-len 8", 0)])
def test_an_evaluation_looks_at_the_length_it_uses(line: str, count: int) -> None:
    assert len(broken_rules(f"--rollout-max-response-len 128 {line}", purpose="eval")) == count


def test_two_evaluation_files_of_one_name_are_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.touch()
    (message,) = broken_rules(f"--eval-prompt-data a {file} a {file}")
    assert message == "evaluation sets: 2 are named 'a'; give each its own name"


def test_a_run_without_an_estimator_is_refused_with_the_plugin_that_has_one() -> None:
    with pytest.raises(ConfigError, match=r"1 mistake in the settings:\n  - advantage_estimator: .*--plugin grpo"):
        load([])


def test_an_evaluation_needs_data_but_no_estimator() -> None:
    assert load([], purpose="eval").config.algorithm.advantage_estimator is None
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        load(["--eval-prompt-data", "none"], purpose="eval")


def test_a_rule_is_silent_where_a_setting_it_reads_was_already_wrong() -> None:
    with pytest.raises(ConfigError, match="1 mistake in the settings") as caught:
        load(["--advantage-estimator", "toy", "--global-batch-size", "much", "--num-steps-per-rollout", "3"])
    assert "--global-batch-size: found 'much'" in str(caught.value)


def test_rules_and_other_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="3 mistakes in the settings"):
        load(["--lr", "fast", "--rollout-sise", "3", "--kl-loss-coef", "1", "--advantage-estimator", "toy"])
