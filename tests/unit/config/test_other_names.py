"""Names of other tools, and names that are misspelt by a letter or two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.config.engine_flags import Refusal, find_flag
from slime_core.config.load import load
from slime_core.config.other_names import COUNTERPARTS
from slime_core.config.settings import core_settings, plugin_settings
from slime_core.errors import ConfigError, nearest
from slime_core.plugins.registry import load_plugins

SETTINGS = [*core_settings().values(), *plugin_settings(load_plugins().options).values()]
FLAGS = {setting.flag for setting in SETTINGS}


def mistakes_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(["--advantage-estimator", "grpo", *argv])
    return str(refused.value)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_a_name_of_another_tool_leads_to_flags_that_exist(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert flag not in FLAGS
    assert isinstance(find_flag(flag), Refusal | None)
    instead = re.findall(r"--[\w-]+", COUNTERPARTS[name])
    known = {one for one in instead if one in FLAGS or isinstance(find_flag(one), tuple) or one == "--plugin"}
    assert set(instead) == known


def test_a_key_of_another_tool_is_answered_with_our_flag(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optimizer]\nlearning_rate = 1e-6\n")
    message = mistakes_of("--config", str(tmp_path / "run.toml"))
    assert "run.toml:2" in message
    assert "--lr" in message


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--output_dir", "--output-dir"),
        ("--n_samples_per_prompt", "--n-samples-per-prompt"),
        ("--num-rolout", "--num-rollout"),
        ("--ref-laod", "--ref-load"),
        ("--sed", "--seed"),
        ("--frobnicate", None),
        ("--use-magic", None),
        ("--rollout-colour", None),
        ("--tis-level", None),
    ],
)
def test_a_flag_is_suggested_if_it_is_one_or_two_letters_away(flag: str, near: str | None) -> None:
    (line,) = [line for line in mistakes_of(flag, "1").splitlines() if flag in line]
    assert re.findall(r"--[\w-]+", line) == [flag, *([near] if near else [])]


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("eva", ["eval", "eve"], "eval"),
        ("lr", ["lx"], ""),
        ("grpo", ["gspo"], "gspo"),
        ("abcd", ["abef"], ""),
        ("abcdef", ["abcdxy"], "abcdxy"),
        ("abcdef", ["abcxyz"], ""),
        ("ab-num-rollout", ["num-rollout"], ""),
    ],
)
def test_two_letters_are_too_many_for_a_short_name(name: str, known: list[str], found: str) -> None:
    assert found in nearest(name, known)
    assert bool(nearest(name, known)) is bool(found)
