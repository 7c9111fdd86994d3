"""The components that a run uses: which, why, and whether they can be imported and do what they should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.components import selection
from slime_core.components.construction import load as load_component
from slime_core.components.selection import SELECTED_BY, check_selection, check_targets, policy_loss, selected
from slime_core.config.load import load
from slime_core.config.options import PluginSettings
from slime_core.config.sampling import EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from tests.plugin_files import Site, activated

PLUGIN = """
@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("length", "acme_p.code:Length")
    add.advantage_estimator("flat", "acme_p.code:Flat", policy_loss="steep")
    add.policy_loss("steep", "acme_p.losses:Steep")
    add.tracker("log", "acme_p.code:Log")
"""
CODE = """
class Length:
    async def score(self, samples): ...
class Flat:
    def estimate(self, batch): ...
class Log:
    def log(self, step, metrics): ...
    def start(self, run): ...
    def close(self, error): ...
"""
FLAGS = ["--advantage-estimator", "flat", "--rm-type", "length"]
Acme = Callable[..., Registry]


@pytest.fixture
def acme(site: Site) -> Acme:
    def write(code: str = CODE, losses: str = "import no_such_engine", plugin: str = PLUGIN) -> Registry:
        site.install("acme", plugin, code=code, losses=losses)
        return activated("acme")

    return write


def config(*flags: str) -> RunConfig:
    return load(flags or FLAGS, check_rules=False).config


def check(registry: Registry, run: RunConfig | None = None, **settings: bool) -> None:
    check_targets(run or config(), registry, trains=True, architecture=None, **settings)


def test_every_used_component_is_named_with_what_chose_it(acme: Acme) -> None:
    entries = [
        (entry.kind, entry.component.name, entry.plugin.name, entry.by)
        for entry in selected(config(), acme(), trains=True, architecture=None)
    ]
    assert [entry[:3] for entry in entries] == [
        (Kind.GENERATE_FUNCTION, "single_turn", "core"),
        (Kind.REWARD_MODEL, "length", "acme"),
        (Kind.DATA_SOURCE, "prompts", "datasets"),
        (Kind.ADVANTAGE_ESTIMATOR, "flat", "acme"),
        (Kind.TRACKER, "log", "acme"),
        (Kind.POLICY_LOSS, "steep", "acme"),
    ]
    settings = ["generate_function", "rm_type", "data_source", "advantage_estimator"]
    assert [entry[3] for entry in entries[:4]] == settings
    assert entries[5][3] == "advantage estimator flat"


def test_an_evaluation_uses_no_estimator_and_the_architecture_chooses_the_model_spec() -> None:
    registry = activate(["datasets", "grpo"], architecture="Qwen3ForCausalLM").registry
    run = config("--advantage-estimator", "grpo")
    evaluated = {entry.kind for entry in selected(run, registry, trains=False, architecture="Qwen3ForCausalLM")}
    assert evaluated == {Kind.GENERATE_FUNCTION, Kind.REWARD_MODEL}
    trained = list(selected(run, registry, trains=True, architecture="Qwen3ForCausalLM"))
    assert (trained[-1].kind, trained[-1].component.name) == (Kind.MODEL_SPEC, "qwen3")


@pytest.mark.parametrize(
    ("of_run", "of_set", "by"),
    [
        ("0.7*math+0.3*f1", None, {"math": "rm_type", "f1": "rm_type"}),
        ("math", "1*math-0.1*dapo:acc", {"math": "rm_type", "dapo": "evaluation set aime"}),
        ("0.7*math+0.3*f1", "f1", {"math": "rm_type", "f1": "rm_type"}),
    ],
)
def test_every_part_of_a_sum_is_used(of_run: str, of_set: str | None, by: dict[str, str]) -> None:
    dataset = EvalDataset(name="aime", path=Path("aime.jsonl"), rm_type=of_set)
    run = RunConfig(rollout=RolloutConfig(rm_type=of_run), eval=EvalConfig(eval_datasets=(dataset,)))
    entries = selected(run, activated("rewards"), trains=False, architecture=None)
    assert {entry.component.name: entry.by for entry in entries if entry.kind is Kind.REWARD_MODEL} == by


def test_every_setting_that_selects_is_a_setting() -> None:
    names = {name for _, section in config() for name in type(section).model_fields}
    assert set(SELECTED_BY) <= names


def test_light_targets_are_imported_and_heavy_ones_only_on_request(acme: Acme) -> None:
    registry = acme()
    check(registry)
    assert "acme_p.code" in sys.modules
    with pytest.raises(PluginError, match=r"acme_p\.losses:Steep .*'steep'"):
        check(registry, heavy=True)


def test_a_target_that_does_not_fit_is_refused_before_the_run(acme: Acme) -> None:
    registry = acme(CODE.replace("async def", "def"), "class Steep: ...\n")
    with pytest.raises(PluginError, match=r"acme_p\.code:Length"):
        check(registry)
    with pytest.raises(PluginError, match="__call__"):
        load_component(registry, Kind.POLICY_LOSS, "steep")


def test_an_estimator_of_tokens_is_left_to_the_ranks(acme: Acme) -> None:
    plugin = PLUGIN.replace('"acme_p.code:Flat"', '"acme_p.code:Flat", scope="token"')
    registry = acme(CODE.replace("Flat", "Steep"), "", plugin)
    check(registry)
    with pytest.raises(PluginError, match=r"acme_p\.code:Flat .*'flat'"):
        check(registry, heavy=True)


def test_targets_of_the_core_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(selection, "load", lambda registry, kind, name: names.append(name))
    check(activated("grpo"), config("--advantage-estimator", "grpo"), heavy=True)
    assert names == ["datasets:prompts", "grpo:grpo"]


# --- Policy losses ----------------------------------------------------------------------------------------------------

SUPERVISED = ["--advantage-estimator", "sft", "--generate-function", "from_label", "--parity-interval", "0"]
SUPERVISED += ["--n-samples-per-prompt", "1"]
OWN_LOSS = PluginSettings(provided={"policy_loss": ("mine = true",)})
CHANGES = {
    "normalize_advantages": ["--normalize-advantages"],
    "use_opd": ["--use-opd", "--opd-teacher-load", "teacher"],
}


@pytest.mark.parametrize(("setting", "flags"), CHANGES.items(), ids=CHANGES)
def test_settings_that_change_advantages_need_a_loss_that_reads_them(
    acme: Acme, setting: str, flags: list[str]
) -> None:
    registry = activated()
    check_selection(config(*SUPERVISED), registry, trains=True)
    check_selection(config(*SUPERVISED, *flags), registry, trains=False)
    check_selection(config(*SUPERVISED, *flags).with_plugins(OWN_LOSS), registry, trains=True)
    with pytest.raises(PluginError, match=rf"{setting} .*'sft'"):
        check_selection(config(*SUPERVISED, *flags), registry, trains=True)
    check_selection(config(*FLAGS, *flags), acme(), trains=True)


def test_a_run_may_name_its_policy_loss() -> None:
    registry = activated("grpo")
    run = config("--advantage-estimator", "grpo", "--policy-loss", "cispo")
    assert policy_loss(run, registry) == "cispo"
    assert policy_loss(config("--advantage-estimator", "grpo"), registry) == "clipped"
    used = selected(run, registry, trains=True, architecture=None)
    assert [entry.by for entry in used if entry.kind is Kind.POLICY_LOSS] == ["policy_loss"]
    for loss, more in (("soft", []), ("sft", ["--normalize-advantages"])):
        with pytest.raises(PluginError, match=f"'{loss}'"):
            check_selection(
                config("--advantage-estimator", "grpo", "--policy-loss", loss, *more), registry, trains=True
            )
