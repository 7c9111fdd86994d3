"""The rules of rewards: each broken once, with its whole text."""

from __future__ import annotations

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
    with pytest.raises(PluginError) as failure:
        check_selection(config, registry, trains=False)
    owner = registry.owner("reward_model", name)
    assert str(failure.value) == (
        f"{by}: reward model {name!r} of {owner} needs {setting}, which is not set. Add "
        f"--{setting.replace('_', '-')}, or choose another reward model."
    )


SERVED = (
    EngineModel(name="scorer", model_path=Path("m"), is_embedding=True),
    EngineModel(name="helper", model_path=Path("m")),
)
SERVES = (
    "The run serves: helper (texts), scorer (scores). Name one of them with --rm-model, or serve it: a table "
    "[[engine.engine_models]] with name and model_path, for scores also is_embedding = true. Or choose another reward "
    "model."
)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("judge", "helpr", "gives texts; rm_model = helpr: not served."),
        ("judge", "scorer", "gives texts; rm_model = scorer: scores."),
        ("served_rm", "helper", "gives scores; rm_model = helper: texts."),
    ],
)
def test_an_auxiliary_model_of_the_wrong_kind_is_refused_before_the_run(name, model, message):
    registry = activate(["rewards"]).registry
    with pytest.raises(PluginError) as failure:
        check_selection(asking(name, model), registry, trains=False)
    owner = registry.owner("reward_model", name)
    who = f"rm_type = {name}: reward model {name!r} of {owner}"
    assert str(failure.value) == f"{who} needs an auxiliary model that {message} {SERVES}"


@pytest.mark.parametrize(("name", "model"), [("judge", "helper"), ("served_rm", "scorer")])
def test_an_auxiliary_model_of_the_right_kind_is_accepted(name, model):
    check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)


def asking(name, model):
    return RunConfig(rollout=RolloutConfig(rm_type=name, rm_model=model), engine=EngineConfig(engine_models=SERVED))
