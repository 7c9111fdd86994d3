"""The rules of over-sampling, of responses that go on and of samples that failed: each broken once, with its text."""

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
        "--rollout-batch-size 8 --over-sampling-batch-size 8",
        "--rollout-batch-size 8 --over-sampling-batch-size 20 --partial-rollout",
        "--async-buffer-size 1 --pause-generation-mode abort --partial-rollout --mask-offpolicy-in-partial-rollout",
        "--partial-rollout --generate-function mine",
        "--failed-samples retry --failed-sample-retries 5",
        "--over-sampling-batch-size 64 --max-staleness 0 --true-on-policy-mode --kl-loss-coef 0",
    ],
)
def test_valid_settings_break_no_rule(line: str) -> None:
    assert broken_rules(line) == []
