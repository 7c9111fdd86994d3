"""Components get what they name; their failures carry the name of their plugin."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from slime_core import RunPlan, RunView
from slime_core.components.construction import construct, refusals, run_view
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ARITHMETIC, JobConfig, ModelConfig, RunConfig
from slime_core.config.settings import core_values
from slime_core.errors import ConfigError, PluginError, RunError
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.provisional import PromptRequest
from tests.plugin_files import Site, activated

PLUGIN = """
class Options(PluginOptions):
    factor: float = Field(2.0, description="What every reward is.")

@hookimpl
def slime_register(add: Registration) -> None:
    add.options(Options)
    for target in (Nothing, OnlyOptions, OnlyRun, Both, NoConstructor, Broken, Refuses, Other):
        add.reward_model(target.__name__, target)
    for target in (plain, with_options, with_both):
        add.reward_model(target.__name__, target)
    add.generate_function("answer", answer)
    add.sample_transform("keep", keep)
    add.sample_transform("keep_all", keep_all, scope="rollout")
    add.advantage_estimator("flat", flat)

class NoConstructor:
    made = ()
    async def score(self, samples): return [self.made] * len(samples)
class Nothing(NoConstructor):
    def __init__(self): self.made = ("nothing",)
class OnlyOptions(NoConstructor):
    def __init__(self, options): self.made = (options.factor,)
class OnlyRun(NoConstructor):
    def __init__(self, run): self.made = (run.seed,)
class Both(NoConstructor):
    def __init__(self, run, options, extra="default"): self.made = (options.factor, run.seed)
class Broken(NoConstructor):
    def __init__(self, options): raise KeyError("weight")
class Refuses(NoConstructor):
    def __init__(self):
        from slime_core.errors import RunError
        raise RunError("no model")
class Other(NoConstructor):
    def __init__(self, options, settings): ...

async def plain(samples): return ["plain"] * len(samples)
async def with_options(samples, options): return [options.factor] * len(samples)
async def with_both(samples, *, run, options): return [(options.factor, run.seed)] * len(samples)
async def answer(sample, params, context, options): return (sample, options.factor)
def keep(group): return group
def keep_all(groups, options): return (groups, options.factor)
def flat(batch): return batch
"""


@pytest.fixture
def registry(site: Site) -> Registry:
    return activated(site.file("mine", PLUGIN))


def built(registry: Registry, kind: Kind, name: str) -> Any:
    options = registry.options["mine"](factor=5.0)
    return construct(registry, kind, name, {"mine": options}, RunView(seed=3))


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("NoConstructor", ()),
        ("Nothing", ("nothing",)),
        ("OnlyOptions", (5.0,)),
        ("OnlyRun", (3,)),
        ("Both", (5.0, 3)),
        ("plain", "plain"),
        ("with_options", 5.0),
        ("with_both", (5.0, 3)),
    ],
)
async def test_a_class_or_a_function_gets_what_it_names(registry: Registry, name: str, reward: object) -> None:
    assert await built(registry, Kind.REWARD_MODEL, name).score(["one", "two"]) == [reward, reward]


async def test_a_function_is_the_one_method_of_its_contract(registry: Registry) -> None:
    assert await built(registry, Kind.GENERATE_FUNCTION, "answer")("sample", "params", "context") == ("sample", 5.0)
    assert built(registry, Kind.SAMPLE_TRANSFORM, "keep")("group") == "group"
    assert built(registry, Kind.SAMPLE_TRANSFORM, "keep_all")("groups") == ("groups", 5.0)
    assert built(registry, Kind.ADVANTAGE_ESTIMATOR, "flat").estimate("batch") == "batch"


def test_a_constructor_that_fails_names_plugin_component_and_place(registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"'mine' .*'Broken' .*KeyError.*mine.py:\d+"):
        built(registry, Kind.REWARD_MODEL, "Broken")
    with pytest.raises(RunError, match=r"^no model$"):
        built(registry, Kind.REWARD_MODEL, "Refuses")


def test_a_constructor_that_names_something_else_is_refused(registry: Registry) -> None:
    with pytest.raises(PluginError, match=r"'mine' (.|\n)*'Other'(.|\n)*'settings'"):
        built(registry, Kind.REWARD_MODEL, "Other")


# --- The view of the run ----------------------------------------------------------------------------------------------


class Wandb(BaseModel):
    project: str = "sums"
    api_key: str = "123"
    token: SecretStr = SecretStr("456")
    base_url: str = "https://me:789@wandb.test/path?token=789"
    password: str = "${WANDB_PASSWORD}"
    folder: Path = Path("/data")


def test_a_plan_without_arguments_is_that_of_default_settings() -> None:
    plan, default = run_view(RunConfig()), RunPlan()
    names = [entry.name for entry in fields(RunPlan) if entry.name != "settings"]
    assert {name: getattr(default, name) for name in names} == {name: getattr(plan, name) for name in names}
    assert plan.settings.keys() == core_values(RunConfig()).keys()


def test_a_plan_has_the_values_of_the_settings() -> None:
    rollout = RolloutConfig(
        rollout_batch_size=3, n_samples_per_prompt=5, rollout_max_response_len=9, reward_key="score"
    )
    model = ModelConfig(hf_checkpoint=Path("/model"))
    plan = run_view(RunConfig(run=JobConfig(seed=7), rollout=rollout, model=model))
    assert (plan.seed, plan.rollout_batch_size, plan.n_samples_per_prompt) == (7, 3, 5)
    assert (plan.max_response_len, plan.max_prompt_len) == (9, None)
    assert (plan.reward_key, plan.settings["hf_checkpoint"]) == ("score", "/model")
    with pytest.raises(TypeError):
        plan.settings["seed"] = 3  # type: ignore[index]


def test_settings_hold_options_of_plugins_and_no_secret() -> None:
    settings = run_view(RunConfig(), {"wandb": Wandb(), "none": None}).settings
    assert {name: value for name, value in settings.items() if name.startswith("wandb")} == {
        "wandb.project": "sums",
        "wandb.base_url": "https://wandb.test/path",
        "wandb.password": "${WANDB_PASSWORD}",
        "wandb.folder": "/data",
    }


def test_a_run_crosses_processes_without_its_prompts() -> None:
    run = run_view(
        RunConfig(), model_folder=ARITHMETIC / "model", folder=Path("/runs/1"), models={"judge": "http://x:3"}
    )
    with_prompts = replace(run, prompts=PromptRequest(Path("prompts.jsonl")))
    assert RunView.from_json(with_prompts.to_json()) == run
    assert pickle.loads(pickle.dumps(with_prompts)) == run
    assert run != with_prompts


def test_the_tokenizer_is_that_of_the_checkpoint() -> None:
    tokenizer = RunView(model_folder=ARITHMETIC / "model").tokenizer()
    assert tokenizer.decode(tokenizer.encode("37+45")) == "37+45"
    with pytest.raises(ConfigError):
        RunView().tokenizer()


# --- What a model spec does not build ---------------------------------------------------------------------------------

SPEC = """
@hookimpl
def slime_register(add: Registration) -> None:
    add.model_spec("oak", "x.y:Z", architectures={{"OakLM"}}, unsupported={path})
def texts(config):
    yield f"asks for {{config['layers']}} layers"
def numbers(config):
    return [1]
"""


@pytest.mark.parametrize(
    ("function", "architecture", "config", "count"),
    [("texts", "OakLM", {"layers": 2}, 1), ("texts", "ElmLM", {"layers": 2}, 0), ("", "OakLM", {"layers": 2}, 0)]
    + [(name, "OakLM", {}, None) for name in ("texts", "numbers", "missing")],
)
def test_a_spec_says_before_the_start_what_it_does_not_build(
    site: Site, function: str, architecture: str, config: dict[str, int], count: int | None
) -> None:
    path = f'f"{{__name__}}:{function}"' if function else None
    registry = activated(site.file("mine", SPEC.format(path=path)))
    if count is None:
        with pytest.raises(PluginError, match="'oak'"):
            refusals(registry, architecture, config, RunView())
    else:
        texts = refusals(registry, architecture, config, RunView())
        assert len(texts) == count
        assert all("'oak'" in text and "'mine'" in text for text in texts)
