"""The rules of evaluations that run while training goes on."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.engines import EngineGroup
from slime_core.config.load import load

TOY = ("--advantage-estimator", "toy")


def broken(line: str) -> list[str]:
    config = load([*TOY, *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--eval-num-gpus 2 --eval-num-gpus-per-engine 2",
        "--eval-num-gpus 1",
        "--eval-interleaved",
        "--eval-interleaved --colocate",
        "--eval-interleaved --async-buffer-size 1",
        "--eval-num-gpus 1 --skip-eval-before-train",
    ],
)
def test_valid_settings_break_no_rule(line):
    assert broken(line) == []


def test_engines_that_only_evaluate_are_a_group_of_their_own():
    config = load([*TOY, "--eval-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"], check_rules=False).config
    assert config.eval_groups == (EngineGroup(num_gpus=4, num_gpus_per_engine=2),)
    assert (config.auxiliary_groups, config.num_engines) == (config.eval_groups, 1)
    assert load([*TOY, "--debug-train-only", "--eval-num-gpus", "1"], check_rules=False).config.eval_groups == ()
    assert load(TOY, check_rules=False).config.eval_groups == ()
