"""What the options of the plugin may be, where they stand, and what activates the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.errors import ConfigError
from slime_core.plugins.conditions import check_settings
from slime_core.plugins.registry import ActivePlugins, activate
from slime_datasets.options import DatasetsOptions

HERE = Path(__file__)
TRAJECTORIES = "--data-source buffered --generate-function from_buffer"


def activated(*argv: str) -> ActivePlugins:
    seen = peek(argv)
    return activate(seen.plugins, choices=seen.choices, flags=seen.flags, paths=seen.paths, without=seen.no_plugins)


def checked(*argv: str) -> Resolved:
    argv = ("--advantage-estimator", "sft", *argv)
    active = activated(*argv)
    found = load(
        argv, presets=active.presets, plugin_options=active.options, inactive=active.inactive, check_rules=False
    )
    check_settings(found, active.registry)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "--generate-function from_messages --loss-mask-type qwen3",
        "--data-source buffered --buffer-filter newest",
        "--data-source buffered --buffer-filter stratified --buffer-key level",
        f"{TRAJECTORIES} --buffer-data {HERE}",
        f"--data-source datasets:buffered --generate-function datasets:from_buffer --buffer-data {HERE}",
    ],
)
def test_options_that_are_read_are_accepted(line: str) -> None:
    checked(*line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--plugin datasets --loss-mask-type qwen3",
            "loss_mask_type = qwen3 has no effect: none of generate_function = single_turn reads it. Leave "
            "--loss-mask-type out, or name a generate function that reads it: from_messages",
        ),
        (
            "--plugin datasets --buffer-filter newest",
            "buffer_filter = newest has no effect: none of data_source = prompts reads it. Leave --buffer-filter out, "
            "or name a data source that reads it: buffered",
        ),
        (
            f"{TRAJECTORIES} --buffer-data /absent",
            "buffer_data: /absent does not exist; accepted: a JSON Lines file of samples, or a folder for such files",
        ),
        (
            f"--data-source buffered --buffer-data {HERE}",
            f"buffer_data = {HERE}: generate function single_turn does not train responses that are given. Choose one "
            "that does, --generate-function from_buffer, or leave it out",
        ),
        (
            "--data-source buffered --buffer-filter stratified",
            "buffer_filter = stratified and buffer_key = none; accepted: both --buffer-filter stratified and "
            "--buffer-key FIELD, or neither",
        ),
        (
            "--data-source buffered --buffer-key level",
            "buffer_filter = oldest and buffer_key = level; accepted: both --buffer-filter stratified and "
            "--buffer-key FIELD, or neither",
        ),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(*line.split())
    assert message in str(caught.value)


def test_a_flag_alone_is_refused_with_what_to_add() -> None:
    with pytest.raises(ConfigError) as caught:
        checked("--buffer-filter", "newest")
    assert "--buffer-filter: a setting of plugin 'datasets' (slime-datasets " in str(caught.value)
    assert "--data-source buffered" in str(caught.value)


def test_the_old_section_of_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    lines = ["[data]", 'data_source = "buffered"', 'buffer_filter = "newest"', 'loss_mask_type = "prefix"']
    file.write_text("\n".join(lines))
    found = checked("--config", str(file))
    assert found.plugin_options["datasets"] == DatasetsOptions(buffer_filter="newest")
    written = tmp_path / "config.toml"
    written.write_text(to_toml(found))
    assert checked("--config", str(written)).plugin_options == found.plugin_options
