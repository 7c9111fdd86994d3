"""The rules of generating ahead: each broken once, with its text."""

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
        "--async-buffer-size 1",
        "--async-buffer-size 1 --max-staleness 1",
        "--async-buffer-size 2 --max-staleness 3 --update-weights-interval 4",
        "--max-staleness 0",
        "--max-staleness 2 --update-weights-interval 0 --num-rollout 3",
        "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --corrections tis",
        "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --use-rollout-logprobs",
        "--async-buffer-size 3 --pause-generation-mode in_place",
    ],
)
def test_valid_settings_break_no_rule(line: str) -> None:
    assert broken_rules(line) == []
