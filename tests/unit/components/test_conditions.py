"""Settings that belong to a plugin: their flags and tables, and the error for one that has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import activate_peeked
from slime_core.components.selection import check_settings
from slime_core.config.explain import explain, help_page, help_topic, to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.discovery import CORE, installed
from tests.plugin_files import Site

PLUGIN = """
from pathlib import Path
from typing import Annotated, Literal

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
def slime_register(add: Registration) -> None:
    add.options(Options)
    for name in ("a", "b", "c"):
        add.sample_transform(name, "nowhere:Nothing")
    add.generate_function("b", "nowhere:Nothing")

@hookimpl
def slime_check(options, plan):
    if options.limit > plan.max_response_len:
        yield f"length_limit = {options.limit} is above rollout_max_response_len = {plan.max_response_len}"
"""


class Lines:
    """Command lines that name the plugin ``mine`` with this source."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def resolved(self, *argv: str, source: str = PLUGIN, rules: bool = False) -> Resolved:
        words = ["--plugin", self._site.file("mine", source), "--advantage-estimator", "sft", *argv]
        self.active = activate_peeked(peek(words), builds_model=False)
        return load(words, **self.active.for_load, check_rules=rules)

    def check(self, line: str, source: str = PLUGIN) -> None:
        resolved = self.resolved(*line.split(), source=source, rules=source == PLUGIN)
        check_settings(resolved, self.active.registry)


@pytest.fixture
def lines(site: Site) -> Lines:
    return Lines(site)


def test_a_setting_has_a_flag_of_its_own_or_that_of_the_plugin(lines: Lines) -> None:
    options = lines.resolved("--length-limit", "7", "--mine.mode", "soft").plugin_options["mine"]
    assert (options.model_dump()["limit"], options.model_dump()["mode"]) == (7, "soft")


@pytest.mark.parametrize("section", ["mine", "rollout"])
def test_both_tables_are_read_and_that_of_the_plugin_is_written(lines: Lines, tmp_path: Path, section: str) -> None:
    (tmp_path / "run.toml").write_text(f"[{section}]\nlimit = 7\n")
    resolved = lines.resolved("--config", str(tmp_path / "run.toml"))
    assert resolved.plugin_options["mine"].model_dump()["limit"] == 7
    (tmp_path / "again.toml").write_text(to_toml(resolved))
    written = (tmp_path / "again.toml").read_text()
    assert written.count("limit = 7") == 1
    assert written.index("[mine]") < written.index("limit = 7")
    assert lines.resolved("--config", str(tmp_path / "again.toml")).plugin_options == resolved.plugin_options


def test_a_setting_is_in_one_of_its_tables(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[rollout]\nlimit = 7\n[mine]\nlimit = 8\n")
    with pytest.raises(ConfigError, match=r"run.toml:4 .*run.toml:2 "):
        lines.resolved("--config", str(tmp_path / "run.toml"))


def test_help_and_explanations_show_it_under_the_plugin(lines: Lines) -> None:
    explained = explain("length-limit", lines.resolved("--length-limit", "7"))
    options = lines.active.loaded.options
    assert "--length-limit N" in help_page("run", options).split("[mine]")[1]
    assert "--length-limit N" in help_topic("mine", options)
    assert explained.startswith("mine.limit = 7\n")


@pytest.mark.parametrize(
    "line",
    [
        "--sample-transforms a --length-limit 7",
        "--sample-transforms b --mine.mode soft --mine.slope 2",
        "--sample-transforms a --length-limit 7 --mine.floor 1",
        "--sample-transforms c --mine.plain",
        "--length-limit 5",
    ],
)
def test_options_that_take_effect_are_accepted(lines: Lines, line: str) -> None:
    lines.check(line)


@pytest.mark.parametrize(
    ("line", "key", "names"),
    [
        ("--sample-transforms b c --length-limit 7", "mine.limit", ["sample_transforms = b c", "transform a"]),
        ("--sample-transforms c --mine.mode soft", "mine.mode", ["sample_transforms = c", "transform a, b"]),
        ("--sample-transforms a --mine.slope 2", "mine.slope", ["mine.mode = soft"]),
        ("--sample-transforms a --mine.floor 2", "mine.floor", ["length_limit", " 5"]),
        ("--sample-transforms a --mine.words /w --reward-key score", "mine.words", ["reward_key = score"]),
        ("--sample-transforms b --mine.weight 2", "mine.weight", ["generate_function = single_turn", "function b"]),
        ("--mine.plain", "mine.plain", ["'mine'", ": a, b, c"]),
        (
            "--sample-transforms a --length-limit 70 --rollout-max-response-len 60",
            "mine.limit",
            ["rollout_max_response_len = 60", "(plugin mine)"],
        ),
    ],
)
def test_options_without_effect_are_refused(lines: Lines, line: str, key: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        lines.check(line)
    (mistake,) = refused.value.mistakes
    assert mistake.key == key
    assert [name for name in names if name not in mistake.message] == []


@pytest.mark.parametrize(
    ("old", "new", "line", "name"),
    [
        ("options.limit >", "options.absent >", "", "AttributeError"),
        ('UsedBy("a")', 'UsedBy("absent")', "--length-limit 7", "absent"),
    ],
)
def test_a_mistake_of_the_plugin_is_attributed(lines: Lines, old: str, new: str, line: str, name: str) -> None:
    with pytest.raises(PluginError, match=f"mine.*{name}"):
        lines.check(line, source=PLUGIN.replace(old, new))


def test_no_table_of_the_core_has_the_name_of_a_plugin() -> None:
    names = {plugin.name for plugin in installed()[0] if plugin != CORE}
    assert len(names) >= 14
    assert not names & RunConfig.model_fields.keys()
