"""The options in command lines and files, and when the plugin takes part."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import resolve
from slime_core.config.explain import to_toml
from slime_core.errors import ConfigError
from slime_grpo.options import GrpoOptions


def test_a_run_that_names_a_transform_uses_it_without_the_plugins_presets() -> None:
    resolved, active = resolve(["--advantage-estimator", "sft", "--sample-transforms", "drop_zero_std"])
    assert "grpo" in {plugin.name for plugin in active.registry.plugins}
    assert active.presets == {}
    assert resolved.plugin_options["grpo"] == GrpoOptions()
    assert resolved.config.algorithm.advantage_estimator == "sft"


@pytest.mark.parametrize(
    "line",
    [
        "--plugin grpo --sample-transforms drop_zero_std punish_overlong --overlong-buffer-len 4",
        "--advantage-estimator sft --sample-transforms punish_overlong --overlong-penalty-factor 0.5",
        "--advantage-estimator gspo --eps-clip-c 3",
        "--advantage-estimator gspo --grpo.std-normalization false",
    ],
)
def test_options_that_reach_a_component_are_accepted(line: str) -> None:
    resolve(line.split())


def test_a_function_that_is_named_by_path_may_read_the_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(args, sample):\n    return 0.0\n")
    resolve(["--plugin", "grpo", "--custom-rm-path", f"{tmp_path}/mine.py:reward", "--overlong-buffer-len", "4"])


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("--plugin grpo --overlong-buffer-len 4", "grpo.overlong_buffer_len"),
        ("--advantage-estimator sft --overlong-buffer-len 4", "grpo.overlong_buffer_len"),
        (
            "--plugin grpo --sample-transforms mask_truncated --overlong-penalty-factor 2",
            "grpo.overlong_penalty_factor",
        ),
        ("--advantage-estimator cispo --eps-clip-c 3", "eps_clip_c"),
        ("--plugin grpo --sample-transforms punish_overlong --overlong-buffer-len 9999", "grpo.overlong_buffer_len"),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(line.split())
    assert caught.value.keys == {setting}


def test_the_section_of_older_files_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[algorithm]\nadvantage_estimator = "sft"\n[rollout]\nsample_transforms = ["punish_overlong"]\n'
        "overlong_buffer_len = 3\n"
    )
    resolved, _ = resolve(["--config", str(file)])
    assert resolved.plugin_options["grpo"] == GrpoOptions(overlong_buffer_len=3)
    file.write_text(to_toml(resolved))
    assert "[grpo]" in file.read_text()
    assert resolve(["--config", str(file)])[0].plugin_options == resolved.plugin_options
