"""The components that a run selects are imported and checked against their contracts before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_core import Kind
from slime_core.config.load import load
from slime_core.config.options import PluginSettings
from slime_core.config.sampling import EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.registry import Registry
from slime_core.plugins.selection import SELECTED_BY, check_selection, check_targets, policy_loss, selected

PLUGIN = """
from slime_core import *
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length")
@hookimpl
def slime_register_advantage_estimators():
    yield Component("flat", target="acme.code:Flat", traits=AdvantageTraits(policy_loss="steep"))
@hookimpl
def slime_register_policy_losses():
    yield Component("steep", target="acme.losses:Steep")
@hookimpl
def slime_register_trackers():
    yield Component("log", target="acme.code:Log")
"""
CODE = """
class Length:
    def __init__(self, options, run): ...
    async def score(self, samples): ...
class Flat:
    def __init__(self, options, run): ...
    def estimate(self, batch): ...
class Log:
    def __init__(self, options, run): ...
    def log(self, step, metrics): ...
    def start(self, run): ...
    def close(self, error): ...
"""
FLAGS = ["--advantage-estimator", "flat", "--rm-type", "length"]

OWN_LOSS = PluginSettings(provided={"policy_loss": ("mine = true",)})
"""As an option that brings a loss of its own says it."""


@pytest.fixture
def acme(install):
    def write(code: str = CODE, losses: str = "import no_such_engine") -> Registry:
        files = {"acme/plugin.py": PLUGIN, "acme/code.py": code, "acme/losses.py": losses}
        install("acme", "2.1", plugins={"acme": "acme.plugin"}, files=files)
        return activate(["acme"]).registry

    return write


def config(*flags: str) -> RunConfig:
    return load(flags or FLAGS, check_rules=False).config


def test_every_used_component_is_named_with_the_setting_that_chose_it(acme):
    found = [
        (one.kind, one.component.name, one.plugin.name, one.by)
        for one in selected(config(), acme(), trains=True, architecture=None)
    ]
    assert found == [
        (Kind.GENERATE_FUNCTION, "single_turn", "core", "generate_function"),
        (Kind.REWARD_MODEL, "length", "acme", "rm_type"),
        (Kind.DATA_SOURCE, "prompts", "core", "data_source"),
        (Kind.ADVANTAGE_ESTIMATOR, "flat", "acme", "advantage_estimator"),
        (Kind.TRACKER, "log", "acme", "its plugin is active"),
        (Kind.POLICY_LOSS, "steep", "acme", "advantage estimator flat"),
    ]


def test_an_evaluation_uses_no_estimator_and_the_architecture_brings_the_model_spec():
    registry = activate(["grpo"], architecture="Qwen3ForCausalLM").registry
    run = config("--advantage-estimator", "grpo")
    measured = {one.kind for one in selected(run, registry, trains=False, architecture="Qwen3ForCausalLM")}
    assert measured == {Kind.GENERATE_FUNCTION, Kind.REWARD_MODEL}
    trained = list(selected(run, registry, trains=True, architecture="Qwen3ForCausalLM"))
    assert (trained[-1].component.name, trained[-1].by) == ("qwen3", "architecture Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("of_run", "of_set", "wanted"),
    [
        ("0.7*math+0.3*f1", None, {"math": "rm_type", "f1": "rm_type"}),
        ("math", "1*math-0.1*dapo:acc", {"math": "rm_type", "dapo": "evaluation set aime"}),
        ("0.7*math+0.3*f1", "f1", {"math": "rm_type", "f1": "rm_type"}),
    ],
)
def test_every_part_of_a_sum_is_used_by_a_run_and_by_its_evaluation_sets(of_run, of_set, wanted):
    dataset = EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type=of_set)
    run = RunConfig(rollout=RolloutConfig(rm_type=of_run), eval=EvalConfig(eval_datasets=(dataset,)))
    found = selected(run, activate(["rewards"]).registry, trains=False, architecture=None)
    assert {one.component.name: one.by for one in found if one.kind is Kind.REWARD_MODEL} == wanted


def test_every_setting_that_selects_is_a_setting():
    names = {name for _, section in config() for name in type(section).model_fields}
    assert set(SELECTED_BY) <= names


def test_light_targets_are_imported_and_heavy_ones_are_left_to_who_loads_them(acme):
    check_targets(config(), acme(), trains=True, architecture=None)
    assert "acme.code" in sys.modules


def test_heavy_targets_are_imported_on_request(acme):
    with pytest.raises(PluginError, match=r"acme\.losses:Steep .*'steep'"):
        check_targets(config(), acme(), trains=True, architecture=None, heavy=True)


def test_a_target_that_does_not_fit_is_refused_before_the_run(acme):
    registry = acme(CODE.replace("async def", "def"))
    with pytest.raises(PluginError, match=r"(?s)acme 2\.1.*acme\.code:Length .*score .*async"):
        check_targets(config(), registry, trains=True, architecture=None)


def test_a_heavy_target_that_does_not_fit_is_refused_where_it_is_loaded(acme):
    registry = acme(losses="class Steep:\n    def __init__(self, options, run): ...\n")
    check_targets(config(), registry, trains=True, architecture=None)
    with pytest.raises(PluginError, match="__call__"):
        registry.load(Kind.POLICY_LOSS, "steep")


def test_the_core_s_own_targets_are_not_imported(monkeypatch):
    loaded: list[str] = []
    registry = activate(["grpo"]).registry
    monkeypatch.setattr(Registry, "load", lambda self, kind, name: loaded.append(name))
    check_targets(config("--advantage-estimator", "grpo"), registry, trains=True, architecture=None, heavy=True)
    assert loaded == ["grpo:grpo"]


def test_an_estimator_that_works_on_tokens_is_left_to_the_ranks(install):
    source = PLUGIN.replace("AdvantageTraits(", "AdvantageTraits(scope='token', ")
    files = {"acme/plugin.py": source, "acme/code.py": CODE.replace("Flat", "Steep"), "acme/losses.py": ""}
    install("acme", "2.1", plugins={"acme": "acme.plugin"}, files=files)
    registry = activate(["acme"]).registry
    check_targets(config(), registry, trains=True, architecture=None)
    with pytest.raises(PluginError, match=r"acme\.code:Flat .*'flat'"):
        check_targets(config(), registry, trains=True, architecture=None, heavy=True)


SUPERVISED = (
    "--advantage-estimator=sft",
    "--generate-function=from_label",
    "--parity-interval=0",
    "--n-samples-per-prompt=1",
)


@pytest.mark.parametrize(
    ("setting", "flags"),
    [("normalize_advantages", ["--normalize-advantages"]), ("use_opd", ["--use-opd", "--opd-teacher-load", "teacher"])],
)
def test_settings_that_change_advantages_are_refused_where_the_loss_reads_none(setting, flags):
    registry = activate([]).registry
    check_selection(config(*SUPERVISED), registry, trains=True)
    check_selection(config(*SUPERVISED, *flags), registry, trains=False)
    check_selection(config(*SUPERVISED, *flags).with_plugins(OWN_LOSS), registry, trains=True)
    with pytest.raises(PluginError, match=rf"{setting} = true: .*'sft' of plugin 'core' .* sft"):
        check_selection(config(*SUPERVISED, *flags), registry, trains=True)


def test_a_run_may_name_its_policy_loss_independently_of_its_estimator():
    registry = activate(["grpo"]).registry
    given = config("--advantage-estimator", "grpo", "--policy-loss", "cispo")
    assert policy_loss(given, registry) == "cispo"
    assert policy_loss(config("--advantage-estimator", "grpo"), registry) == "clipped"
    used = selected(given, registry, trains=True, architecture=None)
    (found,) = (one for one in used if one.kind is Kind.POLICY_LOSS)
    assert (found.component.name, found.by) == ("cispo", "policy_loss")
    with pytest.raises(PluginError, match="'soft'"):
        check_selection(config("--advantage-estimator", "grpo", "--policy-loss", "soft"), registry, trains=True)


def test_a_loss_that_is_named_counts_for_what_changes_advantages():
    named = ("--plugin", "grpo", "--advantage-estimator", "grpo", "--policy-loss", "sft", "--normalize-advantages")
    with pytest.raises(PluginError, match=r"policy loss 'sft' of .* policy_loss,"):
        check_selection(config(*named), activate(["grpo"]).registry, trains=True)


@pytest.mark.parametrize("flags", [["--normalize-advantages"], ["--use-opd", "--opd-teacher-load", "teacher"]])
def test_a_policy_loss_reads_advantages_unless_it_says_otherwise(acme, flags):
    check_selection(config(*FLAGS, *flags), acme(), trains=True)
