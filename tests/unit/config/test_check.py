"""The rules between settings: each broken once, and silent where its settings were broken before."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from slime_core.errors import ConfigError
from tests.unit.config.broken import blames, broken, refused


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


@pytest.mark.parametrize(("line", "count"), [("", 1), ("--eval-max-response-len 8", 0)])
def test_an_evaluation_looks_at_the_length_it_uses(line: str, count: int) -> None:
    assert len(broken(f"--rollout-max-response-len 128 {line}", purpose="eval")) == count


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


# --- Sums of reward models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "terms"),
    [
        ("0.7*math+0.3*f1", [RewardTerm(0.7, "math"), RewardTerm(0.3, "f1")]),
        (" 1 * math - .5*f1-2 * d:acc ", [RewardTerm(1, "math"), RewardTerm(-0.5, "f1"), RewardTerm(-2, "d", "acc")]),
        ("-1*a-b+2*c", [RewardTerm(-1, "a-b"), RewardTerm(2, "c")]),
        ("2*x+1", [RewardTerm(2, "x+1")]),
        ("1*p:a: - 2*p:b:acc", [RewardTerm(1, "p:a"), RewardTerm(-2, "p:b", "acc")]),
    ],
)  # fmt: skip
def test_a_sum_is_weights_and_names_and_a_name_may_hold_signs(written, terms):
    assert reward_terms(written) == tuple(terms)


def test_a_name_alone_is_no_sum():
    assert reward_terms("exact_match") is None
    assert reward_names("exact_match") == ("exact_match",)


def test_the_models_of_a_sum_are_named_once():
    assert reward_names("1*dapo:acc+2*dapo:score+1*math") == ("dapo", "math")


@pytest.mark.parametrize("written", ["math*0.7", "0.7*", "a*b", "1*math+*f1", "0.5*math:", "1*math+2*math"])
def test_a_malformed_sum_is_refused(written):
    blames(refused("--rm-type", written), "rm_type", f"{written!r} ")
    table = f"name = 'a', path = 'a.jsonl', rm_type = '{written}'"
    blames(refused("--eval-datasets", table), "eval_datasets", f"{written!r} ")
