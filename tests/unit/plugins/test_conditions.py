"""Settings that belong to a plugin: their flags and sections, and the message for one that has no effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slime_core.config.explain import explain, help_page, help_topic, to_toml
from slime_core.config.load import Resolved, load
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.discovery import CORE, PluginSource, installed, local_file
from slime_core.plugins.registry import Registry, register
from slime_core.plugins.selection import check_settings

PLUGIN = """
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slime_core import Component, Conflicts, Flag, Needs, PluginOptions, UsedBy, hookimpl


Limit = Annotated[int, Field(gt=0), Flag("--length-limit", section="rollout"), UsedBy("a")]

class Options(PluginOptions):
    limit: Limit = Field(5, description="Tokens.")
    mode: Annotated[Literal["hard", "soft"], Field(description="How."), UsedBy("a", "b")] = "hard"
    slope: Annotated[float, Field(description="Soft."), Needs("mode", equals="soft")] = 1.0
    floor: Annotated[float, Field(description="Low."), Needs("limit")] = 0.0
    words: Annotated[Path | None, Field(description="File."), Conflicts("reward_key")] = None
    plain: Annotated[bool, Field(description="Any.")] = False
    weight: Annotated[float, Field(description="Of b."), UsedBy("b", kind="generate_function")] = 1.0


@hookimpl
def slime_options():
    return Options


@hookimpl
def slime_register_sample_transforms():
    for name in ("a", "b", "c"):
        yield Component(name, target="nowhere:Nothing")


@hookimpl
def slime_register_generate_functions():
    yield Component("b", target="nowhere:Nothing")


@hookimpl
def slime_check(options, plan):
    if options.limit > plan.max_response_len:
        yield f"length_limit = {options.limit} is above rollout_max_response_len = {plan.max_response_len}"
"""


def registry_of(text: str = PLUGIN) -> Registry:
    return register([PluginSource(CORE), local_file(text.encode(), path="mine.py")])


def resolved(*argv: str, registry: Registry | None = None) -> Resolved:
    registry = registry or registry_of()
    return load(argv, presets=registry.presets, plugin_options=registry.options, check_rules=False)


def checked(*argv: str) -> None:
    registry = registry_of()
    argv = ("--advantage-estimator", "sft", *argv)
    check_settings(load(argv, presets=registry.presets, plugin_options=registry.options), registry)


def test_a_flag_of_its_own_sets_the_setting_and_the_plugins_name_another() -> None:
    found = resolved("--length-limit", "7", "--mine.mode", "soft").plugin_options["mine"]
    assert dict(found) == {
        "limit": 7,
        "mode": "soft",
        "slope": 1.0,
        "floor": 0.0,
        "words": None,
        "plain": False,
        "weight": 1.0,
    }


@pytest.mark.parametrize("section", ["mine", "rollout"])
def test_both_sections_are_read_and_the_new_one_is_written(tmp_path: Path, section: str) -> None:
    (tmp_path / "run.toml").write_text(
        f'[{section}]\nlimit = 7\n[mine]\nwords = "w.txt"\n'
        if section != "mine"
        else '[mine]\nlimit = 7\nwords = "w.txt"\n'
    )
    found = resolved("--config", str(tmp_path / "run.toml"))
    assert found.plugin_options["mine"].model_dump()["limit"] == 7
    (tmp_path / "again.toml").write_text(to_toml(found))
    written = (tmp_path / "again.toml").read_text()
    assert written.count("limit = 7") == 1
    assert written.index("[mine]") < written.index("limit = 7")
    assert f'words = "{tmp_path}/w.txt"' in written
    assert resolved("--config", str(tmp_path / "again.toml")).plugin_options == found.plugin_options


def test_a_setting_stands_in_one_of_its_sections(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[rollout]\nlimit = 7\n[mine]\nlimit = 8\n")
    with pytest.raises(ConfigError, match=r"run.toml:4 \[mine\] limit: .* run.toml:2 \[rollout\]"):
        resolved("--config", str(tmp_path / "run.toml"))


def test_help_and_explanations_show_it_under_the_plugin() -> None:
    options = registry_of().options
    assert "--length-limit N" in help_page("run", options).split("[mine]")[1]
    assert "--length-limit N" in help_topic("mine", options)
    explained = explain("length-limit", resolved("--length-limit", "7"))
    assert explained.startswith("mine.limit = 7\n")
    assert "[mine] limit" in explained


@pytest.mark.parametrize(
    "argv",
    [
        ("--sample-transforms", "a", "--length-limit", "7"),
        ("--sample-transforms", "b", "--mine.mode", "soft", "--mine.slope", "2"),
        ("--sample-transforms", "a", "--length-limit", "7", "--mine.floor", "1"),
        ("--sample-transforms", "c", "--mine.plain"),
        ("--length-limit", "5"),
    ],
)
def test_options_that_take_effect_are_accepted(argv: Sequence[str]) -> None:
    checked(*argv)


@pytest.mark.parametrize(
    ("line", "key", "names"),
    [
        ("--sample-transforms b c --length-limit 7", "mine.limit", ["sample_transforms = b c", ": a"]),
        ("--sample-transforms c --mine.mode soft", "mine.mode", ["sample_transforms = c", ": a, b"]),
        ("--sample-transforms a --mine.slope 2", "mine.slope", ["mine.mode = soft"]),
        ("--sample-transforms a --mine.floor 2", "mine.floor", ["length_limit", " 5"]),
        ("--sample-transforms a --mine.words /w --reward-key score", "mine.words", ["reward_key = score"]),
        ("--sample-transforms b --mine.weight 2", "mine.weight", ["generate_function = single_turn", ": b"]),
        ("--mine.plain", "mine.plain", ["'mine'", ": a, b, c"]),
        (
            "--sample-transforms a --length-limit 70 --rollout-max-response-len 60",
            "mine.limit",
            ["rollout_max_response_len = 60", "(plugin mine)"],
        ),
    ],
)
def test_options_without_effect_are_refused(line: str, key: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(*line.split())
    (mistake,) = refused.value.mistakes
    assert mistake.key == key
    assert [name for name in names if name not in mistake.message] == []


def test_two_settings_cannot_share_a_flag() -> None:
    with pytest.raises(PluginError, match=r"'mine' .* limit .* --lr"):
        registry_of(PLUGIN.replace("--length-limit", "--lr"))


def test_a_check_that_fails_is_its_plugins() -> None:
    registry = registry_of(PLUGIN.replace("options.limit >", "options.absent >"))
    with pytest.raises(PluginError, match=r"'mine' .*slime_check .*AttributeError"):
        check_settings(resolved("--advantage-estimator", "sft", registry=registry), registry)


@pytest.mark.parametrize("given", ["yield 3", "return 'text'"])
def test_a_check_yields_messages(given: str) -> None:
    registry = registry_of(PLUGIN[: PLUGIN.index("    if options.limit >")] + f"    {given}\n")
    with pytest.raises(PluginError, match=r"slime_check .*TypeError"):
        check_settings(resolved("--advantage-estimator", "sft", registry=registry), registry)


def test_a_condition_that_names_nothing_is_its_plugins_mistake() -> None:
    registry = registry_of(PLUGIN.replace('UsedBy("a")', 'UsedBy("absent")'))
    with pytest.raises(PluginError, match=r"mine.limit: UsedBy .* absent"):
        check_settings(resolved("--length-limit", "7", "--advantage-estimator", "sft", registry=registry), registry)


def test_no_section_of_the_core_has_the_name_of_a_plugin_that_ships() -> None:
    names = {"agents", "compat", "datasets", "grpo", "models", "offpolicy", "ppo", "rewards", "searchr1", "testing"}
    assert not names & RunConfig.model_fields.keys()
    assert not {plugin.name for plugin in installed() if plugin != CORE} & RunConfig.model_fields.keys()
