"""The rules of the critic: each broken once, with its whole text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--num-rollout 5 --num-critic-only-steps 5",
            "num_critic_only_steps = 5 leaves the actor no rollout: num_rollout = 5; give at most 4, or more rollouts",
        ),
        (
            "--critic-lr 1e-5 --min-lr 1e-4",
            "critic_lr = 1e-05 is below min_lr = 0.0001, which the critic's schedule shares with the actor's; raise "
            "critic_lr, or lower min_lr",
        ),
        (
            "--critic-lr 1e-5 --lr-warmup-init 1e-4",
            "critic_lr = 1e-05 is below lr_warmup_init = 0.0001, which the critic's schedule shares with the actor's; "
            "raise critic_lr, or lower lr_warmup_init",
        ),
    ],
)
def test_a_broken_rule_says_what_to_write_instead(line, message):
    assert broken_rules(line) == [message]


def test_settings_within_bounds_break_no_rule():
    line = "--num-rollout 5 --num-critic-only-steps 4 --critic-lr 1e-4 --min-lr 1e-4 --lr-warmup-init 1e-4"
    assert broken_rules(line) == []


def test_start_weights_of_the_critic_are_a_model(tmp_path: Path):
    assert broken_rules(f"--critic-load {tmp_path}") == [
        f"critic_load: {tmp_path} holds no config.json; accepted: a Hugging Face folder on this machine (download a "
        "hub model first)"
    ]
