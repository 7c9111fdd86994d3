"""The rules between functions that are named by path and the other settings: each broken once."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load

CP2 = "--actor-num-gpus-per-node 2 --context-parallel-size 2"


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        f"--custom-megatron-init-path a.b --spec a.b c {CP2}",
        "--custom-update-weight-post-write-path a.b --update-weight-transport disk",
        "--custom-tis-function-path a.b --custom-pg-loss-reducer-function-path c.d",
        "--rollout-data-postprocess-path e.f --custom-loss-function-path a.b",
    ],
)
def test_what_goes_together_is_accepted(line: str) -> None:
    assert broken_rules(line) == []
