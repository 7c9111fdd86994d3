"""Which plugins take part in a run: named ones, and those whose components or options it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.activation import activate_peeked
from slime_core.components.selection import check_selection, policy_loss
from slime_core.config.load import Resolved, load, peek
from slime_core.config.sampling import RewardTerm, reward_terms
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.registration import Kind
from slime_core.rollout.row_checks import offered_to_rows
from tests.plugin_files import Site

REGISTER = "@hookimpl\ndef slime_register(add: Registration) -> None:\n    "
PLUGIN = """
from typing import Annotated

class Options(PluginOptions):
    strength: Annotated[float, Flag("--NAME-strength")] = Field(1.0, description="How much.")

@hookimpl
def slime_register(add: Registration) -> None:
    add.correction("fade", "NAME_p.code:Fade")
    add.reward_model("length", "NAME_p.code:Length")
    add.tracker("book", "NAME_p.code:Book")
    add.model_spec("oak", "NAME_p.code:Oak", architectures={"NAMELM"})
    add.presets(lr=0.5)
    add.options(Options)

@hookimpl
def slime_run_start(run): ...
"""
KINDS = {
    "advantage_estimator": "--advantage-estimator",
    "policy_loss": "--policy-loss",
    "sample_transform": "--sample-transforms",
    "generate_function": "--generate-function",
    "data_source": "--data-source",
    "rollout_source": "--rollout-source",
    "reward_model": "--rm-type",
    "correction": "--corrections",
}


@pytest.fixture
def acme(site: Site) -> Site:
    """The site with plugin ``acme``."""
    site.install("acme", PLUGIN.replace("NAME", "acme"))
    return site


def active(*argv: str) -> ActivePlugins:
    return activate_peeked(peek(argv), builds_model=False)


def names(plugins: ActivePlugins) -> list[str]:
    """The plugins that take part, without that of the default data source."""
    return [plugin.name for plugin in plugins.registry.plugins if plugin.name != "datasets"]


def recorded(plugins: ActivePlugins) -> list[str]:
    return [entry.name for entry in plugins.manifest.plugins if entry.name != "datasets"]


def part(*argv: str) -> list[str]:
    """The plugins that take part in the run of a command line, without ``core``."""
    return names(active(*argv))[1:]


def resolved(*argv: str) -> tuple[Resolved, ActivePlugins]:
    plugins = active(*argv)
    return load(argv, **plugins.for_load, check_rules=False), plugins


# --- Installed, taking part, named ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("acme")
def test_an_installed_plugin_takes_no_part_but_its_components_and_options_exist() -> None:
    plugins = active()
    assert names(plugins) == ["core"]
    assert recorded(plugins) == ["core"]
    assert plugins.registry.names(Kind.TRACKER) == ()
    assert plugins.loaded.owner(Kind.CORRECTION, "fade").name == "acme"
    assert "acme" in plugins.loaded.options
    assert plugins.presets == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--corrections", "fade"],
        ["--corrections", "acme:fade"],
        ["--rm-type", "0.5*length+0.5*random"],
        ["--eval-datasets", 'name = "a", path = "a.jsonl", rm_type = "length"'],
        ["--acme-strength", "2"],
    ],
)
def test_a_plugin_takes_part_by_a_component_or_by_an_option(acme: Site, argv: list[str]) -> None:
    plugins = active(*argv)
    assert names(plugins) == ["core", "acme"]
    assert recorded(plugins) == ["core", "acme"]
    assert plugins.registry.names(Kind.TRACKER) == ("book",)
    assert plugins.presets == {}


@pytest.mark.parametrize(
    ("text", "takes_part"),
    [
        ("[acme]\nstrength = 2\n", ["acme"]),
        ("[acme]\nstrength = 1.0\n", ["acme"]),
        ('[algorithm]\ncorrections = ["fade"]\n', ["acme"]),
        ('[run]\nplugins = ["acme"]\n', ["acme"]),
        ("[optimizer]\nlr = 0.1\n", []),
        ("[acme]\n", []),
    ],
)
def test_a_file_counts_like_flags(acme: Site, tmp_path: Path, text: str, takes_part: list[str]) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert part("--config", str(tmp_path / "run.toml")) == takes_part


@pytest.mark.usefixtures("acme")
def test_the_sets_of_an_evaluation_file_count(tmp_path: Path) -> None:
    sets = {"datasets": [{"name": "short", "path": "a.jsonl", "rm_type": "length"}]}
    (tmp_path / "eval.yaml").write_text(json.dumps(sets))
    assert part("--eval-config", str(tmp_path / "eval.yaml")) == ["compat", "acme"]


@pytest.mark.parametrize(("kind", "flag"), KINDS.items(), ids=KINDS)
def test_a_flag_names_components_of_every_kind(site: Site, kind: str, flag: str) -> None:
    site.install("acme", f"{REGISTER}add.{kind}('mine', 'x.y:Z')")
    assert part(flag, "mine") == ["acme"]
    with pytest.raises(PluginError, match=rf"{flag}.*'mien'.*mine"):
        active(flag, "mien")


@pytest.mark.usefixtures("acme")
def test_a_named_plugin_takes_part_and_its_presets_count() -> None:
    settings, plugins = resolved("--plugin", "acme")
    assert names(plugins) == ["core", "acme"]
    assert settings.config.optimizer.lr == 0.5
    assert resolved("--plugin", "acme", "--lr", "0.1")[0].config.optimizer.lr == 0.1
    assert part("--plugin", "acme", "core", "acme") == ["acme"]


@pytest.mark.usefixtures("acme")
def test_only_plugins_that_take_part_have_options_in_the_result() -> None:
    assert "acme" not in resolved()[0].plugin_options
    assert "acme" in resolved("--acme-strength", "2")[0].plugin_options


@pytest.mark.usefixtures("acme")
def test_the_architecture_of_the_checkpoint_chooses_the_plugin_with_its_spec() -> None:
    plugins = activate(architecture="acmeLM")
    assert names(plugins) == ["core", "acme"]
    assert plugins.presets == {}
    with pytest.raises(PluginError, match=r"NobodyLM(.|\n)*acmeLM"):
        activate(architecture="NobodyLM", without=["transformers"])


def test_two_plugins_with_a_spec_are_an_error_unless_one_is_named_or_left_out(site: Site) -> None:
    for name in ("acme", "zeta"):
        site.install(name, f"{REGISTER}add.model_spec('{name}', 'x.y:Z', architectures={{'AcmeLM'}})")
    with pytest.raises(PluginError, match=r"acme-dist.*zeta-dist"):
        activate(architecture="AcmeLM")
    assert names(activate(["zeta"], architecture="AcmeLM")) == ["core", "zeta"]
    assert names(activate(without=["acme"], architecture="AcmeLM")) == ["core", "zeta"]


@pytest.mark.usefixtures("acme")
def test_a_plugin_that_is_left_out_does_not_exist(tmp_path: Path) -> None:
    assert part("--plugin", "acme", "--no-plugin", "acme") == []
    with pytest.raises(PluginError, match="'fade'"):
        active("--corrections", "fade", "--no-plugin", "acme")
    with pytest.raises(ConfigError, match="--acme-strength"):
        resolved("--acme-strength", "2", "--no-plugin", "acme")
    (tmp_path / "run.toml").write_text("[acme]\nstrength = 2\nanything = 3\n[optimizer]\nlr = 0.1\n")
    settings, plugins = resolved("--config", str(tmp_path / "run.toml"), "--no-plugin", "acme")
    assert names(plugins) == ["core"]
    assert settings.config.optimizer.lr == 0.1
    with pytest.raises(ConfigError):
        resolved("--config", str(tmp_path / "run.toml"))
    assert names(active("--no-plugin", "core")) == ["core"]


def test_a_broken_plugin_can_be_left_out_and_is_an_error_once_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("acme", "import no_such_thing")
    assert part() == []
    assert "no_such_thing" in capsys.readouterr().err
    assert part("--no-plugin", "acme") == []
    assert "no_such_thing" not in capsys.readouterr().err
    with pytest.raises(PluginError, match="no_such_thing"):
        active("--plugin", "acme")


@pytest.mark.usefixtures("acme")
def test_a_local_file_replaces_the_installed_plugin_of_its_name(acme: Site) -> None:
    plugins = active("--plugin", acme.file("acme", f"{REGISTER}add.reward_model('mine', 'x.y:Z')"))
    assert [str(plugin.source) for plugin in plugins.registry.plugins if plugin.name == "acme"] == ["file"]
    assert [component.name for component in plugins.registry.loaded["acme"].added.components] == ["mine"]
    assert plugins.loaded.offers(Kind.CORRECTION, "fade") == []


# --- Several plugins with one name ------------------------------------------------------------------------------------


def both(site: Site, source: str) -> None:
    for name in ("acme", "zeta"):
        site.install(name, source.replace("NAME", name))


def test_a_name_of_two_plugins_is_for_the_user_to_choose(site: Site) -> None:
    both(site, PLUGIN)
    with pytest.raises(PluginError, match=r"--corrections.*acme-dist.*zeta-dist(.|\n)*acme:fade or zeta:fade"):
        active("--corrections", "fade")
    assert part("--corrections", "zeta:fade") == ["zeta"]
    assert part("--corrections", "fade", "--no-plugin", "acme") == ["zeta"]


def chosen(*argv: str) -> Any:
    """The settings of a command line whose components can be used."""
    settings, plugins = resolved(*argv)
    check_selection(settings.config, plugins.registry, trains=True)
    return settings.config, plugins.registry


PRESETS = """
@hookimpl
def slime_register(add: Registration) -> None:
    add.advantage_estimator("mine", "x.y:Z", reads={"rewards"}, policy_loss="soft")
    add.policy_loss("soft", "x.y:Z")
    add.sample_transform("cut", "x.y:Z")
    add.generate_function("single_turn", "x.y:Z")
    add.presets(advantage_estimator="mine", sample_transforms=("cut", "punish_overlong"))
    add.tracker("NAME", "x.y:Z")
"""


def test_a_preset_means_the_component_of_its_plugin(site: Site) -> None:
    both(site, PRESETS)
    config, registry = chosen("--plugin", "zeta")
    assert registry.owner(Kind.ADVANTAGE_ESTIMATOR, config.algorithm.advantage_estimator).name == "zeta"
    assert registry.owner(Kind.POLICY_LOSS, policy_loss(config, registry)).name == "zeta"
    assert registry.owner(Kind.SAMPLE_TRANSFORM, config.rollout.sample_transforms[0]).name == "zeta"


def test_a_sum_of_rewards_in_a_preset_means_the_models_of_its_plugin(site: Site) -> None:
    source = f"{REGISTER}add.reward_model('length', 'x.y:Z'); add.presets(rm_type='0.5*length+0.5*random')"
    both(site, source)
    settings, _ = resolved("--plugin", "zeta")
    assert reward_terms(settings.config.rollout.rm_type) == (RewardTerm(0.5, "zeta:length"), RewardTerm(0.5, "random"))
    assert part("--rm-type", "1*acme:length:score") == ["acme"]


def test_it_does_so_if_the_other_plugin_takes_part_too(site: Site) -> None:
    both(site, PRESETS)
    config, registry = chosen("--plugin", "zeta", "--policy-loss", "acme:soft")
    assert set(registry.loaded) >= {"zeta", "acme"}
    assert registry.owner(Kind.ADVANTAGE_ESTIMATOR, config.algorithm.advantage_estimator).name == "zeta"
    assert registry.owner(Kind.POLICY_LOSS, policy_loss(config, registry)).name == "acme"
    config, registry = chosen("--plugin", "zeta", "--sample-transforms", "acme:cut")
    assert registry.owner(Kind.POLICY_LOSS, policy_loss(config, registry)).name == "zeta"


def test_a_default_of_the_core_means_the_component_of_the_core(site: Site) -> None:
    both(site, PRESETS)
    config, registry = chosen("--plugin", "zeta")
    assert registry.owner(Kind.GENERATE_FUNCTION, config.rollout.generate_function).name == "core"
    with pytest.raises(PluginError, match="core:single_turn"):
        active("--plugin", "zeta", "--generate-function", "single_turn")


def test_trackers_of_one_name_are_all_used(site: Site) -> None:
    both(site, PLUGIN)
    _, registry = chosen("--plugin", "acme", "zeta", "--lr", "0.1", "--advantage-estimator", "grpo")
    assert registry.names(Kind.TRACKER) == ("acme:book", "zeta:book")


def test_rows_choose_among_plugins_that_take_part(site: Site) -> None:
    both(site, PLUGIN)
    for argv, length in (
        ([], set()),
        (["--plugin", "acme"], {"length"}),
        (["--acme-strength", "2", "--zeta-strength", "2"], {"acme:length", "zeta:length"}),
    ):
        settings, plugins = resolved(*argv)
        names = offered_to_rows(settings.config, plugins.registry)["rm_type"]
        assert {name for name in names if name.endswith("length")} == length


def test_a_setting_that_two_named_plugins_preset_differently_must_be_set(site: Site) -> None:
    both(site, f"{REGISTER}add.presets(gamma=0.9 if 'NAME' == 'acme' else 0.7, lr=0.5)")
    with pytest.raises(ConfigError) as refused:
        resolved("--plugin", "acme", "zeta")
    assert refused.value.keys == {"gamma"}
    assert resolved("--plugin", "acme", "zeta", "--gamma", "0.8")[0].config.algorithm.gamma == 0.8
    assert resolved("--plugin", "acme")[0].config.algorithm.gamma == 0.9


def test_the_policy_loss_of_an_estimator_brings_its_plugin(site: Site) -> None:
    site.install("acme", f"{REGISTER}add.advantage_estimator('mine', 'x.y:Z', policy_loss='soft')")
    site.install("zeta", f"{REGISTER}add.policy_loss('soft', 'x.y:Z')")
    assert part("--advantage-estimator", "mine") == ["acme", "zeta"]
    assert part("--advantage-estimator", "mine", "--policy-loss", "clipped") == ["acme"]


def test_the_preset_of_a_plugin_may_name_the_component_of_another(acme: Site) -> None:
    acme.install("zeta", f"{REGISTER}add.presets(corrections=('fade',))")
    assert part("--plugin", "zeta") == ["acme", "zeta"]
    assert part("--plugin", "zeta", "--corrections", "tis") == ["offpolicy", "zeta"]


# --- The plugins of this project --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "takes_part"),
    [
        ("", []),
        ("--plugin grpo", ["grpo"]),
        ("--advantage-estimator ppo", ["ppo"]),
        ("--advantage-estimator ppo --corrections tis", ["offpolicy", "ppo"]),
    ],
)
def test_plugins_of_this_project_take_part_by_what_they_add(argv: str, takes_part: list[str]) -> None:
    assert part(*argv.split()) == takes_part
