"""The rules between settings: each broken once, and silent where its settings were broken before."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.errors import ConfigError
from tests.unit.config.broken import blames, broken


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSON object"),
        ("[]", "JSON object"),
        ("{}", "architecture"),
        ('{"architectures": []}', "architecture"),
        ('{"architectures": "Qwen3ForCausalLM"}', "architecture"),
    ],
)
def test_a_config_json_that_names_no_architecture_is_a_mistake(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    blames(broken(f"--hf-checkpoint {tmp_path}"), "hf_checkpoint", f"{tmp_path} ", "config.json", found)


@pytest.mark.parametrize(
    "more", ["", ', "max_position_embeddings": null', ', "max_position_embeddings": 8, "rope_scaling": {"factor": 4}']
)
def test_any_length_is_accepted_where_the_context_length_is_unknown(more: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["Qwen3ForCausalLM"]{more}}}')
    assert broken(f"--hf-checkpoint {tmp_path} --rollout-max-response-len 5000") == []


@pytest.mark.parametrize(("line", "count"), [("", 1), ("--eval-max-response-len 8", 0)])
def test_an_evaluation_looks_at_the_length_it_uses(line: str, count: int) -> None:
    assert len(broken(f"--rollout-max-response-len 128 {line}", purpose="eval")) == count


def test_a_run_without_an_estimator_is_refused_with_the_plugin_that_has_one() -> None:
    with pytest.raises(ConfigError) as caught:
        load([])
    blames(caught.value.mistakes, "advantage_estimator", "--plugin grpo")


def test_an_evaluation_needs_data_but_no_estimator() -> None:
    assert load([], purpose="eval").config.algorithm.advantage_estimator is None
    with pytest.raises(ConfigError) as caught:
        load(["--eval-prompt-data", "none"], purpose="eval")
    assert "eval_prompt_data" in caught.value.keys


def test_a_rule_is_silent_where_a_setting_it_reads_was_already_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--advantage-estimator", "toy", "--global-batch-size", "much", "--num-steps-per-rollout", "3"])
    blames(caught.value.mistakes, "global_batch_size", "'much'")


def test_rules_and_other_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="--rollout-sise: ") as caught:
        load(["--lr", "fast", "--rollout-sise", "3", "--kl-loss-coef", "1", "--advantage-estimator", "toy"])
    assert caught.value.keys == {"lr", "kl_loss_coef"}
