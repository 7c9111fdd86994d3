"""The rules of off-policy corrections and of agreement between learner and engine: each broken once."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--use-kl-loss --kl-loss-coef 0 --kl-coef 0.1",
        "--use-kl-loss --use-unbiased-kl",
        "--use-rollout-logprobs --get-mismatch-metrics",
        "--true-on-policy-mode --parity-mean-tolerance 1e-6 --get-mismatch-metrics",
    ],
)
def test_what_fits_together_is_left_alone(line):
    assert broken_rules(line) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--use-rollout-logprobs --custom-tis-function-path a.b",
            "custom_tis_function_path = a.b weighs learner against engine, and use_rollout_logprobs has the ratio of "
            "the policy loss do that already; leave one of them out",
        ),
        (
            "--get-mismatch-metrics --custom-loss-function-path c.d",
            "get_mismatch_metrics = true has no effect with custom_loss_function_path = c.d, which replaces the loss",
        ),
        (
            "--true-on-policy-mode --num-steps-per-rollout 2",
            "true_on_policy_mode trains once on what the trained weights drew, and num_steps_per_rollout = 2: every "
            "step after the first would be off-policy; give 1, or leave the mode out",
        ),
        ("--true-on-policy-mode --global-batch-size 64", "true_on_policy_mode trains once on what the trained weights"),
        (
            "--true-on-policy-mode --custom-tis-function-path a.b",
            "true_on_policy_mode leaves nothing to correct, and custom_tis_function_path = a.b; leave one of them out",
        ),
        (
            "--true-on-policy-mode --parity-max-tolerance 0.01",
            "true_on_policy_mode accepts at most parity_max_tolerance = 0.0001, and 0.01 is given; lower it, or leave "
            "it out",
        ),
    ],
)
def test_a_broken_rule_names_both_settings_and_the_way_out(line, message):
    (found,) = broken_rules(line)
    assert found.startswith(message)
