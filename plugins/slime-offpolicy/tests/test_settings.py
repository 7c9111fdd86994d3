"""What the options of the corrections may be, where they stand, and what activates the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.errors import ConfigError
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.selection import check_settings
from slime_offpolicy.options import OffPolicyOptions


def activated(*argv: str) -> ActivePlugins:
    seen = peek(argv)
    return activate(seen.plugins, choices=seen.choices, flags=seen.flags, code=seen.code, without=seen.no_plugins)


def checked(*argv: str) -> Resolved:
    argv = ("--advantage-estimator", "sft", *argv)
    active = activated(*argv)
    found = load(argv, **active.for_settings)
    check_settings(found, active.registry)
    return found


def test_the_flags_are_options_of_the_plugin():
    found = checked("--corrections", "tis", "mis", "--tis-clip", "1.5", "--mis-level", "sequence")
    assert found.plugin_options["offpolicy"] == OffPolicyOptions(tis_clip=1.5, mis_level="sequence")


@pytest.mark.parametrize(
    "line",
    [
        "--corrections icepop --tis-clip 5 --tis-clip-low 0.5",
        "--corrections tis mis --tis-clip 5 --mis-level sequence",
        "--corrections veto opsm --veto-threshold 0.1 --opsm-delta 0.1",
        "--corrections mis --mis-clip 0.4",
        "--corrections mis --mis-mode mask --mis-clip-low 0.1 --mis-clip 0.4",
    ],
)
def test_options_that_reach_a_correction_are_accepted(line):
    checked(*line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--corrections tis --tis-clip-low 3", "tis_clip_low = 3"),
        ("--corrections mis --mis-mode clip --mis-clip 0.4", "mis_clip = 0.4; mis_mode"),
        ("--corrections mis --mis-clip-low 0.3", "mis_clip_low = 0.3"),
        ("--corrections tis --mis-level sequence", "Leave --mis-level"),
        ("--corrections mis veto --tis-clip 5", "tis_clip = 5"),
        ("--corrections tis --opsm-delta 0.1", "opsm_delta = 0.1"),
        ("--plugin offpolicy --veto-threshold 0.1", "veto_threshold = 0.1"),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line, message):
    with pytest.raises(ConfigError) as caught:
        checked(*line.split())
    assert message in str(caught.value)


# --- Files and activation ---------------------------------------------------------------------------------------------


def test_a_flag_alone_is_refused_with_what_to_add():
    with pytest.raises(ConfigError) as caught:
        checked("--tis-clip", "3")
    assert "'offpolicy' (slime-offpolicy" in str(caught.value)
    assert "add --plugin offpolicy" in str(caught.value)
    with pytest.raises(ConfigError, match="tis_clip = 3"):
        checked("--plugin", "offpolicy", "--tis-clip", "3")


@pytest.mark.parametrize("section", ["algorithm", "offpolicy"])
def test_a_file_that_gives_an_option_activates_the_plugin(tmp_path: Path, section):
    file = tmp_path / "run.toml"
    file.write_text(f"[{section}]\ntis_clip = 2.0\nopsm_delta = 1e-4\n")
    active = activated("--config", str(file))
    (need,) = map(str, active.by_need)
    assert need.startswith("offpolicy is active because ")
    assert "run.toml:2" in need
    assert active.presets == {}
    assert checked("--config", str(file)).plugin_options["offpolicy"] == OffPolicyOptions()


def test_the_old_section_of_a_file_is_read(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\ncorrections = ["tis"]\ntis_clip = 3.0\n')
    found = checked("--config", str(file))
    assert found.plugin_options["offpolicy"] == OffPolicyOptions(tis_clip=3.0)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(found))
    assert checked("--config", str(written)).plugin_options == found.plugin_options


def test_a_key_of_another_table_activates_nothing(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[acme]\ntis_clip = 3.0\n")
    assert activated("--config", str(file)).by_need == ()


def test_the_table_of_a_plugin_that_is_taken_away_is_left_out(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text("[offpolicy]\ntis_clip = 2.0\n")
    found = checked("--config", str(file), "--no-plugin", "offpolicy")
    assert not any("tis_clip" in key for key in found.provenance)
    file.write_text("[algorithm]\ntis_clip = 2.0\n")  # the old section, which is not the plugin's
    with pytest.raises(ConfigError, match="'offpolicy'"):
        checked("--config", str(file), "--no-plugin", "offpolicy")
