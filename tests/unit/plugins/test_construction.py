"""The arguments of every component's constructor, and how they travel between processes."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from slime_core import Kind, PromptRequest, RunPlan, RunView
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ARITHMETIC, JobConfig, ModelConfig, RunConfig
from slime_core.config.settings import core_values
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.construction import construct, run_view
from slime_core.plugins.discovery import CORE, PluginSource, local_file
from slime_core.plugins.registry import Registry, register

PLUGIN = """
from pydantic import BaseModel, Field
from slime_core import Component, hookimpl

class Options(BaseModel, frozen=True, extra="forbid"):
    factor: float = Field(2.0, description="What every reward is.")

@hookimpl
def slime_options():
    return Options

@hookimpl
def slime_register_reward_models():
    yield Component("mine", target=f"{__name__}:Mine")
    yield Component("broken", target=f"{__name__}:Broken")

class Mine:
    def __init__(self, options, run):
        self.made_with = options.factor, run

    async def score(self, samples):
        return [self.made_with[0]] * len(samples)

class Broken(Mine):
    def __init__(self, options, run):
        raise KeyError("weight")
"""


class Wandb(BaseModel):
    project: str = "sums"
    api_key: str = "123"
    token: SecretStr = SecretStr("456")
    label_key: str = "label"
    base_url: str = "https://me:789@wandb.test/path?token=789"
    password: str = "${WANDB_PASSWORD}"
    folder: Path = Path("/data")


@pytest.fixture
def registry() -> Registry:
    return register([PluginSource(CORE), local_file(PLUGIN.encode(), path="mine.py")])


def test_a_component_gets_its_plugins_options_and_the_run(registry: Registry) -> None:
    run = RunView(seed=3)
    options = registry.options["mine"](factor=5.0)  # type: ignore[call-arg]
    assert construct(registry, Kind.REWARD_MODEL, "mine", {"mine": options}, run).made_with == (5.0, run)


def test_a_plugin_whose_options_nothing_says_gets_its_defaults(registry: Registry) -> None:
    assert construct(registry, Kind.REWARD_MODEL, "mine", {}, RunView()).made_with[0] == 2.0


def test_a_constructor_that_fails_is_named_with_its_plugin(registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"'mine' .*'broken' .*KeyError"):
        construct(registry, Kind.REWARD_MODEL, "broken", {}, RunView())


def test_a_plan_without_arguments_is_that_of_a_run_with_default_settings() -> None:
    plan = run_view(RunConfig())
    assert {one.name: getattr(RunPlan(), one.name) for one in fields(RunPlan) if one.name != "settings"} == {
        one.name: getattr(plan, one.name) for one in fields(RunPlan) if one.name != "settings"
    }
    assert plan.settings.keys() == core_values(RunConfig()).keys()


def test_a_plan_says_what_the_settings_say() -> None:
    rollout = RolloutConfig(
        rollout_batch_size=3,
        n_samples_per_prompt=5,
        rollout_max_response_len=9,
        rollout_temperature=0.5,
        reward_key="score",
    )
    model = ModelConfig(hf_checkpoint=Path("/model"))
    plan = run_view(RunConfig(run=JobConfig(seed=7), rollout=rollout, model=model))
    assert (plan.seed, plan.rollout_batch_size, plan.n_samples_per_prompt) == (7, 3, 5)
    assert (plan.max_response_len, plan.max_prompt_len, plan.temperature) == (9, None, 0.5)
    assert (plan.reward_key, plan.settings["hf_checkpoint"]) == ("score", "/model")


def test_settings_hold_options_of_plugins_and_no_secret() -> None:
    settings = run_view(RunConfig(), {"wandb": Wandb(), "none": None}).settings
    assert {name: value for name, value in settings.items() if name.startswith("wandb")} == {
        "wandb.project": "sums",
        "wandb.label_key": "label",
        "wandb.base_url": "https://wandb.test/path",
        "wandb.password": "${WANDB_PASSWORD}",
        "wandb.folder": "/data",
    }


def test_settings_are_read_only() -> None:
    with pytest.raises(TypeError):
        run_view(RunConfig()).settings["seed"] = 3  # type: ignore[index]


def test_a_run_crosses_processes_without_its_prompts() -> None:
    run = run_view(
        RunConfig(),
        model_folder=ARITHMETIC / "model",
        folder=Path("/runs/1"),
        resumed_step=4,
        models={"judge": "http://127.0.0.1:3"},
    )
    with_prompts = replace(run, prompts=PromptRequest(Path("prompts.jsonl")))
    assert RunView.from_json(with_prompts.to_json()) == run
    assert pickle.loads(pickle.dumps(with_prompts)) == run
    assert run != with_prompts


def test_the_tokenizer_is_the_checkpoints() -> None:
    tokenizer = RunView(model_folder=ARITHMETIC / "model").tokenizer()
    assert tokenizer.decode(tokenizer.encode("37+45")) == "37+45"
    assert tokenizer is RunView(seed=9, model_folder=ARITHMETIC / "model").tokenizer()


def test_without_a_checkpoint_there_is_no_tokenizer() -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        RunView().tokenizer()
