"""The rules of generating ahead: each broken once, with its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load

HERE = Path.cwd()


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
def test_what_can_be_kept_breaks_no_rule(line: str) -> None:
    assert broken_rules(line) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--max-staleness 0 --update-weights-interval 2",
            "max_staleness = 0, but update_weights_interval = 2 publishes weights after every 2 rollouts: the last "
            "rollout that they draw is trained 1 rollouts later; give a bound of at least 1, or a shorter interval",
        ),
        (
            "--max-staleness 3 --update-weights-interval 0 --num-rollout 9",
            "max_staleness = 3, but update_weights_interval = 0 publishes weights never, and there are num_rollout = "
            "9: the last rollout that they draw is trained 8 rollouts later; give a bound of at least 8, or a shorter "
            "interval",
        ),
        (
            "--max-staleness 0 --async-buffer-size 1",
            "max_staleness = 0 begins no group that would be trained more than 0 rollouts after the weights that drew "
            "it, and async_buffer_size = 1 asks for 1, so that 1 of them would never be there; give a buffer of at "
            "most 0, or a bound of at least 1",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_arithmetic(line: str, message: str) -> None:
    assert broken_rules(line) == [message]
