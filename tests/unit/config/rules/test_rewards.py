"""The rules of rewards: each broken once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.config.engines import EngineConfig, EngineModel
from slime_core.config.sampling import EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.selection import check_selection


@pytest.mark.parametrize(("rewards", "setting"), [("remote_rm", "rm_url"), ("1*judge+1*math", "rm_model")])
def test_a_reward_model_without_a_model_to_call_is_refused_before_the_run(rewards, setting):
    config, registry = RunConfig(rollout=RolloutConfig(rm_type=rewards)), activate(["rewards"]).registry
    name = {"rm_url": "remote_rm", "rm_model": "judge"}[setting]
    refused(config, registry, f"rm_type = {rewards}", name, setting)


def test_an_evaluation_sets_reward_model_without_a_model_to_call_is_refused_before_the_run():
    dataset = EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type="1*judge+1*math")
    config = RunConfig(eval=EvalConfig(eval_datasets=(dataset,)))
    refused(config, activate(["rewards"]).registry, "evaluation set aime", "judge", "rm_model")


def refused(config, registry, by, name, setting):
    with pytest.raises(
        PluginError, match=rf"^{re.escape(by)}: .*'{name}' .* {setting}[, ].*--{setting.replace('_', '-')}"
    ):
        check_selection(config, registry, trains=False)


SERVED = (
    EngineModel(name="scorer", model_path=Path("m"), is_embedding=True),
    EngineModel(name="helper", model_path=Path("m")),
)


@pytest.mark.parametrize(
    ("name", "model", "found"),
    [
        ("judge", "helpr", "helpr: not served"),
        ("judge", "scorer", "scorer: scores"),
        ("served_rm", "helper", "helper: texts"),
    ],
)
def test_an_auxiliary_model_of_the_wrong_kind_is_refused_before_the_run(name, model, found):
    names = rf"rm_type = {name}: .*'{name}' .*rm_model = {found}\. .*helper \(texts\), scorer \(scores\)"
    with pytest.raises(PluginError, match=names):
        check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)


@pytest.mark.parametrize(("name", "model"), [("judge", "helper"), ("served_rm", "scorer")])
def test_an_auxiliary_model_of_the_right_kind_is_accepted(name, model):
    check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)


def asking(name, model):
    return RunConfig(rollout=RolloutConfig(rm_type=name, rm_model=model), engine=EngineConfig(engine_models=SERVED))
