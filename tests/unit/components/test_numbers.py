"""Reward models that return several numbers: a setting must name the one that trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.components.selection import check_numbers
from slime_core.config.sampling import EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from tests.plugin_files import activated


def check(rm_type: str, key: str | None = None, *, of_set: EvalDataset | None = None, trains: bool = True) -> None:
    rollout = RolloutConfig(rm_type=rm_type, reward_key=key)
    run = RunConfig(rollout=rollout, eval=EvalConfig(eval_datasets=() if of_set is None else (of_set,)))
    check_numbers(run, activated("rewards"), trains=trains)


def of_set(rm_type: str, key: str | None = None) -> EvalDataset:
    return EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type=rm_type, reward_key=key)


@pytest.mark.parametrize(
    ("rm_type", "key", "named"),
    [("dapo", None, "None"), ("dapo", "scor", "scor"), ("1*math+1*dapo", "acc", "None"), ("1*dapo:scor", None, "scor")],
)
def test_a_reward_of_several_numbers_needs_one_that_counts(rm_type: str, key: str | None, named: str) -> None:
    with pytest.raises(PluginError, match=rf"{re.escape(rm_type)}.*'dapo' .* acc, score .* {named} "):
        check(rm_type, key)


def test_an_evaluation_set_needs_one_too() -> None:
    with pytest.raises(PluginError, match=r"aime.*'dapo' .* acc, score "):
        check("math", of_set=of_set("dapo"))
    check("math", of_set=of_set("dapo", "acc"))
    check("math", "acc", of_set=of_set("dapo"))


def test_named_keys_plain_numbers_and_unused_settings_of_evaluations_are_accepted() -> None:
    check("dapo", "score")
    check("0.5*dapo:acc+0.5*instructions:loose")
    check("math")
    check("math", "score")
    check("dapo", trains=False)
