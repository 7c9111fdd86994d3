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
            "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2",
            "kl_coef = 0.1 takes the divergence off the reward, and kl_loss_coef = 0.2 adds it to the loss, so it "
            "would count twice; leave one of them out (--use-kl-loss with --kl-loss-coef 0 measures it)",
        ),
        (
            "--use-unbiased-kl",
            "use_unbiased_kl = true has no effect without use_kl_loss; add --use-kl-loss, or leave it out",
        ),
        (
            "--use-unbiased-kl --use-kl-loss --kl-loss-type k2",
            "use_unbiased_kl = true with kl_loss_type = k2: the mean of k2 is not the divergence, so weighing it makes "
            "nothing unbiased; choose --kl-loss-type k1, k3 or low_var_kl",
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
            "--true-on-policy-mode --update-weights-interval 2",
            "true_on_policy_mode needs the weights published after every rollout, and update_weights_interval = 2; "
            "give 1, or leave the mode out",
        ),
        (
            "--true-on-policy-mode --corrections tis veto",
            "true_on_policy_mode leaves nothing to correct, and corrections = tis veto; leave one of them out",
        ),
        (
            "--true-on-policy-mode --custom-tis-function-path a.b",
            "true_on_policy_mode leaves nothing to correct, and custom_tis_function_path = a.b; leave one of them out",
        ),
        (
            "--true-on-policy-mode --use-rollout-logprobs",
            "true_on_policy_mode has a ratio of exactly 1, of the learner to itself, and use_rollout_logprobs takes it "
            "to the engine; leave one of them out",
        ),
        (
            "--true-on-policy-mode --bf16",
            "true_on_policy_mode is held in float32 only, and bf16 = true rounds a thousand times as much; leave one "
            "of them out",
        ),
        (
            "--true-on-policy-mode --parity-interval 4",
            "true_on_policy_mode compares learner and engine at every rollout, and parity_interval = 4; give 1, or "
            "leave the mode out",
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
