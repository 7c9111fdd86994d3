"""The rules of rewards: each broken once, with its whole text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.measuring import EvalConfig, EvalDataset
from slime_core.config.schema import RolloutConfig, RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.registry import activate
from slime_core.plugins.selection import check_selection

ADDRESS = "rm_url is no address of a service; accepted is http://HOST:PORT/PATH, or the same with https"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rm_url": "localhost:8000"}, ADDRESS),
        ({"rm_url": "file:///etc/passwd"}, ADDRESS),
        (
            {"rm_url": "http://me:secret@host/score"},
            "rm_url holds a password for host, which the record of the run would show; export it and write ${NAME} in "
            "its place",
        ),
        (
            {"rm_judge_pattern": "(a"},
            "rm_judge_pattern = '(a' is no regular expression: missing ), unterminated subpattern at position 0",
        ),
        (
            {"rm_judge_prompt": "lost.txt"},
            "rm_judge_prompt = lost.txt is no file; give a text file with {prompt} and {response} in it",
        ),
        (
            {"rm_tokenizer": "lost"},
            "rm_tokenizer = lost is no folder; give the Hugging Face folder of the reward model",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(settings, message):
    config = RunConfig(rollout=RolloutConfig(**settings))
    assert [one.message for one in mistakes(config) if one.message.startswith("rm_")] == [message]


def test_a_password_may_come_from_the_environment():
    config = RunConfig(rollout=RolloutConfig(rm_url="http://me:${KEY}@host/score"))
    assert not [one.message for one in mistakes(config) if one.message.startswith("rm_")]


@pytest.mark.parametrize(("rewards", "setting"), [("remote_rm", "rm_url"), ("1*judge+1*math", "rm_model")])
def test_a_reward_model_that_asks_nobody_is_refused_before_the_run(rewards, setting):
    config, registry = RunConfig(rollout=RolloutConfig(rm_type=rewards)), activate([]).registry
    name = {"rm_url": "remote_rm", "rm_model": "judge"}[setting]
    refused(config, registry, f"rm_type = {rewards}", name, setting)


def test_one_of_an_evaluation_set_that_asks_nobody_is_refused_before_the_run():
    dataset = EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type="1*judge+1*math")
    config = RunConfig(eval=EvalConfig(eval_datasets=(dataset,)))
    refused(config, activate([]).registry, "evaluation set aime", "judge", "rm_model")


def refused(config, registry, by, name, setting):
    with pytest.raises(PluginError) as failure:
        check_selection(config, registry, trains=False)
    owner = registry.owner("reward_model", name)
    assert str(failure.value) == (
        f"{by}: reward model {name!r} of {owner} needs {setting}, which is not set. Add "
        f"--{setting.replace('_', '-')}, or choose another reward model."
    )
