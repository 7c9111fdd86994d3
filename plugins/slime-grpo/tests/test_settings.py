"""What the options may be, where they stand, and what activates the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.errors import ConfigError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.selection import check_settings
from slime_grpo.options import GrpoOptions


def activated(*argv: str) -> ActivePlugins:
    seen = peek(argv)
    return activate(seen.plugins, choices=seen.choices, flags=seen.flags, code=seen.code, without=seen.no_plugins)


def checked(*argv: str) -> Resolved:
    active = activated(*argv)
    found = load(
        argv, presets=active.presets, plugin_options=active.options, inactive=active.inactive, check_rules=False
    )
    check_settings(found, active.registry)
    return found


def test_a_transform_activates_the_plugin_without_its_presets():
    found = checked("--advantage-estimator", "sft", "--sample-transforms", "drop_zero_std")
    assert found.plugin_options["grpo"] == GrpoOptions()
    assert found.config.algorithm.advantage_estimator == "sft"
    assert activated("--sample-transforms", "drop_zero_std").presets == {}


@pytest.mark.parametrize(
    "line",
    [
        "--plugin grpo --sample-transforms drop_zero_std punish_overlong --overlong-buffer-len 4",
        "--advantage-estimator sft --sample-transforms punish_overlong --overlong-penalty-factor 0.5",
        "--advantage-estimator gspo --eps-clip-c 3",
        "--advantage-estimator gspo --grpo.std-normalization false",
    ],
)
def test_options_that_reach_a_component_are_accepted(line):
    checked(*line.split())


def test_a_function_that_is_named_by_path_may_read_the_options(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def reward(args, sample):\n    return 0.0\n")
    checked("--plugin", "grpo", "--custom-rm-path", f"{tmp_path}/mine.py:reward", "--overlong-buffer-len", "4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--plugin grpo --overlong-buffer-len 4", "overlong_buffer_len = 4"),
        (
            "--plugin grpo --sample-transforms mask_truncated --overlong-penalty-factor 0.5",
            "sample_transforms = mask_truncated",
        ),
        ("--plugin grpo --advantage-estimator cispo --eps-clip-c 3", "--eps-clip and --eps-clip-high"),
        (
            "--plugin grpo --sample-transforms punish_overlong --overlong-buffer-len 9 --rollout-max-response-len 8",
            "rollout_max_response_len = 8",
        ),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line, message):
    with pytest.raises(ConfigError) as caught:
        checked(*line.split())
    assert message in str(caught.value)


def test_a_flag_alone_is_refused_with_what_to_add():
    with pytest.raises(ConfigError) as caught:
        checked("--advantage-estimator", "sft", "--overlong-buffer-len", "4")
    assert "'grpo' (slime-grpo" in str(caught.value)
    assert "add --plugin grpo" in str(caught.value)
    with pytest.raises(ConfigError, match="punish_overlong"):
        checked("--plugin", "grpo", "--overlong-buffer-len", "4")


def test_the_section_of_files_in_which_they_stood_before_is_read(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[algorithm]\nadvantage_estimator = "sft"\n[rollout]\nsample_transforms = ["punish_overlong"]\n'
        "overlong_buffer_len = 3\n"
    )
    found = checked("--config", str(file))
    assert found.plugin_options["grpo"] == GrpoOptions(overlong_buffer_len=3)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(found))
    assert "[grpo]" in written.read_text()
    assert checked("--config", str(written)).plugin_options == found.plugin_options
