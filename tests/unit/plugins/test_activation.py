"""Naming a component, a prompt format or a setting activates the one plugin that claims it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slime_core.cli.activation import activate_named
from slime_core.config.load import Choice, load, peek
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import Declared, how_to_get, inactive_flags, scan
from slime_core.plugins.manifest import Manifest, attach

PLUGIN = """
from pydantic import BaseModel, Field
from slime_core import Component, hookimpl

class Options(BaseModel, frozen=True, extra="forbid"):
    strength: float = Field(1.0, description="How much.")

@hookimpl
def slime_register_corrections():
    yield Component("fade", target="{package}.code:Fade", summary="of {package}")

@hookimpl
def slime_register_reward_models():
    yield Component("length", target="{package}.code:Length", summary="of {package}")

@hookimpl
def slime_register_trackers():
    yield Component("book-{package}", target="{package}.code:Book")

@hookimpl
def slime_presets():
    return {{"lr": 0.5}}

@hookimpl
def slime_options():
    return Options

@hookimpl
def slime_run_start(run):
    pass
"""
CLAIMS = {"slime.corrections": {"fade": "acme"}, "slime.reward_models": {"length": "acme"}}


def add(install, name: str = "acme", *, groups=None, source: str = PLUGIN) -> None:
    files = {f"{name}/plugin.py": source.format(package=name), f"{name}/code.py": ""}
    own = {group: dict.fromkeys(names, name) for group, names in CLAIMS.items()} if groups is None else groups
    install(f"{name}-dist", files=files, plugins={name: f"{name}.plugin"}, groups=own)


def activated(*argv: str) -> ActivePlugins:
    seen = peek(argv)
    return activate(seen.plugins, choices=seen.choices, flags=seen.flags, without=seen.no_plugins)


def names(active: ActivePlugins) -> list[str]:
    return [plugin.name for plugin in active.registry.plugins]


def why(active: ActivePlugins) -> dict[str, str]:
    """Plugins that nobody named, with what needs them."""
    return {need.plugin.name: need.why for need in active.by_need}


def test_naming_a_component_activates_the_plugin_that_claims_it(install):
    add(install)
    active = activated("--corrections", "fade")
    assert names(active) == ["core", "acme"]
    assert why(active) == {"acme": "--corrections names fade"}
    assert [(one.plugin, one.needed_by) for one in active.manifest.entries if one.claimed] == [
        ("acme", "--corrections names fade")
    ]


def test_a_plugin_that_is_active_by_claim_brings_options_and_hooks_but_no_presets_and_no_trackers(install):
    add(install)
    registry = activated("--corrections", "fade").registry
    assert set(registry.options) == {"acme"}
    assert [one.plugin.name for one in registry.lifecycle["slime_run_start"]] == ["acme"]
    assert registry.names(Kind.TRACKER) == ()
    assert dict(registry.presets) == {}


def test_a_plugin_that_is_named_brings_everything(install):
    add(install)
    registry = activated("--corrections", "fade", "--plugin", "acme").registry
    assert registry.names(Kind.TRACKER) == ("book-acme",)
    assert dict(registry.presets) == {"lr": (0.5, "acme")}


def test_another_process_activates_it_in_the_same_way(install):
    add(install)
    manifest = Manifest.from_json(activated("--corrections", "fade").manifest.to_json())
    registry = attach(manifest)
    assert registry.offers(Kind.CORRECTION, "fade")
    assert registry.names(Kind.TRACKER) == ()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--rm-type", "0.5*length+0.5*random"], "--rm-type names length"),
        (["--eval-datasets", 'name = "a", path = "a.jsonl", rm_type = "length"'], "evaluation set a names length"),
        (["--rm-type", "acme:length"], "--rm-type names acme:length"),
    ],
)
def test_a_name_counts_wherever_a_run_gives_it(install, argv, reason):
    add(install)
    active = activated(*argv)
    assert names(active) == ["core", "acme"]
    assert reason in why(active)["acme"]


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("advantage_estimator", "--advantage-estimator"),
        ("policy_loss", "--policy-loss"),
        ("sample_transform", "--sample-transforms"),
        ("generate_function", "--generate-function"),
        ("data_source", "--data-source"),
        ("rollout_source", "--rollout-source"),
    ],
)
def test_each_kind_that_a_flag_names_has_its_group_of_claims(install, kind, flag):
    register = "policy_losses" if kind == "policy_loss" else f"{kind}s"
    source = f"""
from slime_core import Component, hookimpl
@hookimpl
def slime_register_{register}():
    yield Component("mine", target="x.y:Z")
"""
    add(install, source=source, groups={f"slime.{register}": {"mine": "acme"}})
    active = activated(flag, "mine")
    assert why(active) == {"acme": f"{flag} names mine"}
    assert active.registry.offers(Kind(kind), "mine")


def test_a_file_says_where_it_names_the_component(install, tmp_path: Path):
    add(install)
    (tmp_path / "run.toml").write_text('[algorithm]\ncorrections = ["fade"]\n')
    active = activated("--config", str(tmp_path / "run.toml"))
    assert "run.toml:2" in why(active)["acme"]


def test_the_sets_of_an_evaluation_file_count(install, tmp_path: Path):
    add(install)
    sets = {"datasets": [{"name": "short", "path": "a.jsonl", "rm_type": "length"}]}
    (tmp_path / "eval.yaml").write_text(json.dumps(sets))
    assert names(activated("--eval-config", str(tmp_path / "eval.yaml"))) == ["core", "compat", "acme"]


def test_the_preset_of_a_named_plugin_counts_unless_the_run_says_otherwise(install):
    add(install)
    first = """
from slime_core import hookimpl
@hookimpl
def slime_presets():
    return {{"corrections": ("fade",)}}
"""
    add(install, "first", source=first, groups={})
    active = activated("--plugin", "first")
    assert "plugin first" in why(active)["acme"]
    assert names(activated("--plugin", "first", "--corrections", "none-such")) == ["core", "first"]


def test_the_policy_loss_of_a_claimed_estimator_activates_its_own_plugin(install):
    estimator = """
from slime_core import AdvantageTraits, Component, hookimpl
@hookimpl
def slime_register_advantage_estimators():
    yield Component("mine", target="x.y:Z", traits=AdvantageTraits(policy_loss="soft"))
"""
    loss = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_policy_losses():
    yield Component("soft", target="x.y:Z")
"""
    add(install, "one", source=estimator, groups={"slime.advantage_estimators": {"mine": "one"}})
    add(install, "two", source=loss, groups={"slime.policy_losses": {"soft": "two"}})
    active = activated("--advantage-estimator", "mine")
    assert why(active)["one"] == "--advantage-estimator names mine"
    assert "mine names soft" in why(active)["two"]
    assert names(activated("--advantage-estimator", "mine", "--policy-loss", "clipped")) == ["core", "one"]


def test_an_active_plugin_s_offer_wins_before_any_claim(install):
    add(install)
    add(install, "other", groups={})
    active = activated("--plugin", "other", "--corrections", "fade")
    assert names(active) == ["core", "other"]


def test_a_plain_name_means_the_named_plugin_s_and_a_full_one_the_other_s(install):
    add(install)
    add(install, "other", groups={})
    active = activated("--plugin", "other", "--corrections", "acme:fade")
    assert names(active) == ["core", "other", "acme"]
    assert active.registry.find(Kind.CORRECTION, "fade").summary == "of other"
    assert active.registry.find(Kind.CORRECTION, "acme:fade").summary == "of acme"
    assert active.registry.owner(Kind.CORRECTION, "acme:fade").name == "acme"


def test_two_claims_are_for_the_user_to_choose(install):
    add(install)
    add(install, "other")
    with pytest.raises(PluginError, match=r"--corrections(.|\n)*--plugin acme-dist:acme .*--plugin other-dist:other"):
        activated("--corrections", "fade")
    assert names(activated("--corrections", "other:fade")) == ["core", "other"]
    assert names(activated("--corrections", "fade", "--no-plugin", "acme")) == ["core", "other"]


def test_a_claim_that_is_withheld_says_so(install):
    add(install)
    with pytest.raises(PluginError, match=r"^fade \(--corrections\) .*'acme' .*--no-plugin"):
        activated("--corrections", "fade", "--no-plugin", "acme")


def test_a_claim_of_another_distribution_does_not_count(install):
    add(install, groups={})
    install("stranger", files={"stranger.py": ""}, groups={"slime.corrections": {"fade": "acme"}})
    assert names(activated("--corrections", "fade")) == ["core"]
    assert how_to_get("correction", "fade") is None


def test_a_component_of_an_uninstalled_distribution_of_ours_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(PluginError, match=" slime-grpo"):
        activate([]).registry.find(Kind.ADVANTAGE_ESTIMATOR, "grpo")


def test_a_plugin_before_the_component_has_to_be_installed():
    with pytest.raises(PluginError, match=r"--corrections .*missing:fade.*'missing'"):
        activated("--corrections", "missing:fade")


def test_a_prompt_file_activates_the_plugin_that_claims_its_suffix(install, tmp_path: Path):
    add(install, groups={"slime.prompt_formats": {"tsv": "acme"}})
    (tmp_path / "a.tsv").write_text("")
    active = activated("--prompt-data", f"{tmp_path / 'a.tsv'}@[:3]")
    assert why(active) == {"acme": "--prompt-data names tsv"}
    assert names(activated("--eval-prompt-data", "held-out", str(tmp_path / "a.tsv"))) == ["core", "acme"]


def test_a_setting_of_an_inactive_plugin_is_refused_with_what_activates_it(install, tmp_path: Path):
    add(install, groups={**CLAIMS, "slime.flags": {"fade-strength": "acme"}})
    with pytest.raises(ConfigError, match=r"--fade-strength: .*acme-dist 1\.0.*--plugin acme"):
        load(["--fade-strength", "2"], inactive=activated("--fade-strength", "2").inactive)
    (tmp_path / "run.toml").write_text("[algorithm]\nfade_strength = 2\n[acme]\nstrength = 2\n")
    argv, inactive = ["--config", str(tmp_path / "run.toml")], activated().inactive
    with pytest.raises(ConfigError, match=r"run\.toml:2 \[algorithm\] fade_strength: .*\n.*run\.toml:3 \[acme\]: "):
        load(argv, inactive=inactive)


@pytest.mark.parametrize(
    ("text", "is_active"),
    [
        ("[algorithm]\nfade_strength = 2\n", True),
        ("[acme]\nstrength = 2\n", True),
        ("[other]\nfade_strength = 2\n", False),
        ("[optimizer]\nlr = 0.1\n", False),
    ],
)
def test_a_claimed_setting_of_a_file_activates_the_plugin(install, tmp_path: Path, text, is_active):
    add(install, groups={**CLAIMS, "slime.flags": {"fade-strength": "acme", "lr": "acme"}})
    (tmp_path / "run.toml").write_text(text)
    active = activated("--config", str(tmp_path / "run.toml"))
    assert names(active) == (["core", "acme"] if is_active else ["core"])
    assert active.registry.names(Kind.TRACKER) == ()
    assert active.presets == {}


def test_the_settings_of_an_active_plugin_are_not_refused(install):
    add(install, groups={**CLAIMS, "slime.flags": {"fade-strength": "acme"}})
    assert "fade-strength" not in activated("--corrections", "fade").inactive


def test_a_setting_that_by_itself_means_the_plugin_activates_it(install, tmp_path: Path):
    add(install, groups={"slime.flags": {"fade-file": "acme:activates"}})
    active = activated("--fade-file", "a.json")
    assert "--fade-file" in why(active)["acme"]
    (tmp_path / "run.toml").write_text('[data]\nfade_file = "a.json"\n')
    active = activated("--config", str(tmp_path / "run.toml"))
    assert "run.toml:2 [data] fade_file" in why(active)["acme"]
    assert active.presets == {}


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("groups", "tracks_by_flag", "tracks_by_file"),
    [
        ({**CLAIMS, "slime.flags": {"fade-file": "acme:activates"}}, True, True),
        ({**CLAIMS, "slime.flags": {"fade-file": "acme"}}, False, False),
        ({"slime.flags": {"fade-file": "acme"}}, False, True),
    ],
    ids=["it activates the plugin", "the plugin offers a component too", "the plugin has nothing but trackers"],
)
def test_a_setting_brings_the_trackers_of_the_plugin_that_it_activates(
    install, tmp_path: Path, groups, tracks_by_flag, tracks_by_file, in_file
):
    add(install, groups=groups)
    (tmp_path / "run.toml").write_text('[acme]\nfade_file = "a.json"\n')
    words = ("--config", str(tmp_path / "run.toml")) if in_file else ("--fade-file", "a.json")
    tracks = tracks_by_file if in_file else tracks_by_flag
    assert activated(*words).registry.names(Kind.TRACKER) == (("book-acme",) if tracks else ())


def test_an_estimator_alone_activates_its_plugin():
    active = activated("--advantage-estimator", "ppo")
    assert why(active) == {"ppo": "--advantage-estimator names ppo"}


@pytest.fixture
def only(monkeypatch):
    """As if no distributions of ours were installed but the core and these."""

    def hide(*distributions: str) -> None:
        found = scan()
        left = tuple(one for one in found.entries if one.distribution in ("slime-rl", *distributions))
        for module in ("activation", "discovery"):
            monkeypatch.setattr(f"slime_core.plugins.{module}.scan", lambda: Declared(left))

    return hide


def test_the_demo_trains_with_the_core_slime_grpo_and_slime_models_alone(only):
    only("slime-grpo", "slime-models")
    assert names(activate_named(peek(["--plugin", "grpo"]))) == ["core", "grpo", "models"]


def test_without_slime_models_the_demo_says_what_to_install(only):
    only("slime-grpo")
    with pytest.raises(PluginError, match="slime-models"):
        activate_named(peek(["--plugin", "grpo"]))


def test_inactive_flags_know_our_distributions_that_are_not_installed(monkeypatch):
    monkeypatch.setattr(
        "slime_core.plugins.discovery.OUR_DISTRIBUTIONS", {"slime-acme": {"slime.flags": ("fade-strength",)}}
    )
    assert "slime-acme" in inactive_flags([], scan())["fade-strength"]


def test_a_choice_says_what_names_it():
    assert peek(["--corrections", "tis", "veto"]).choices(activate([]).registry)[:2] == [
        Choice("correction", "tis", "--corrections"),
        Choice("correction", "veto", "--corrections"),
    ]
