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
        "--true-on-policy-mode --get-mismatch-metrics",
    ],
)
def test_valid_settings_break_no_rule(line):
    assert broken_rules(line) == []
