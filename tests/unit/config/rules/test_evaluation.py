"""The rules of evaluations beside training: their texts."""

from __future__ import annotations

import pytest

from slime_core.config.load import load
from slime_core.config.rules.evaluation import EVALUATION
from slime_core.config.serving import EngineGroup

TOY = ("--advantage-estimator", "toy")


def broken(line: str) -> list[str]:
    config = load([*TOY, *line.split()], check_rules=False).config
    return [message for rule in EVALUATION for message in rule(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--eval-num-gpus 2 --eval-num-gpus-per-engine 2",
        "--eval-num-gpus 1",
        "--eval-interleaved",
        "--eval-interleaved --colocate",
        "--eval-interleaved --async-buffer-size 1",
        "--eval-num-gpus 1 --eval-interval none",
        "--eval-num-gpus 1 --skip-eval-before-train",
    ],
)
def test_what_is_right_is_silent(line):
    assert broken(line) == []


def test_engines_that_only_evaluate_are_a_group_of_their_own():
    config = load([*TOY, "--eval-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"], check_rules=False).config
    assert config.eval_groups == (EngineGroup(num_gpus=4, num_gpus_per_engine=2),)
    assert (config.beside_groups, config.num_engines) == (config.eval_groups, 0)
    assert load([*TOY, "--debug-train-only", "--eval-num-gpus", "1"], check_rules=False).config.eval_groups == ()
    assert load(TOY, check_rules=False).config.eval_groups == ()


MESSAGES = {
    "--eval-num-gpus 1 --eval-interleaved": (
        "eval_num_gpus = 1 has evaluations answered by engines of their own, and eval_interleaved by the policy's; "
        "leave one of the two out"
    ),
    "--eval-num-gpus-per-engine 2": (
        "eval_num_gpus_per_engine = 2 has no effect without eval_num_gpus, because the policy's engines evaluate; add "
        "--eval-num-gpus N, or leave it out"
    ),
    "--eval-num-gpus 3 --eval-num-gpus-per-engine 2": (
        "eval_num_gpus = 3 is no multiple of eval_num_gpus_per_engine = 2; change one, or say how large engines "
        "that only evaluate are with --eval-num-gpus-per-engine"
    ),
    "--eval-num-gpus 1 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2": (
        "eval_num_gpus = 1 is no multiple of rollout_num_gpus_per_engine = 2; change one, or say how large engines "
        "that only evaluate are with --eval-num-gpus-per-engine"
    ),
    "--eval-num-gpus 1 --colocate": (
        "eval_num_gpus = 1 with colocate: an evaluation begins when the learner has left the devices that it shares, "
        "and asleep it has no weights to hand to other engines; add --eval-interleaved instead, or leave one of the "
        "two out"
    ),
    "--eval-interleaved --eval-prompt-data none": (
        "eval_interleaved has no effect: there is nothing to evaluate on; add --eval-prompt-data NAME FILE"
    ),
    "--eval-num-gpus 1 --eval-interval none --skip-eval-before-train": (
        "eval_num_gpus = 1 has no effect: skip_eval_before_train leaves the first evaluation out, and no eval_interval "
        "asks for others; add --eval-interval N, or leave it out"
    ),
}


@pytest.mark.parametrize("line", MESSAGES)
def test_what_is_wrong_is_told(line):
    assert broken(line) == [MESSAGES[line]]
