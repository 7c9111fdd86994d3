"""The options in command lines and files, slime's flags for them, and when the plugin takes part."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import resolve
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved
from slime_core.errors import ConfigError
from slime_offpolicy.options import OffPolicyOptions


def resolved(line: str) -> Resolved:
    return resolve(["--plugin", "grpo", *line.split()])[0]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--corrections icepop --tis-clip 5 --tis-clip-low 0.5", {"tis_clip": 5.0, "tis_clip_low": 0.5}),
        ("--corrections tis mis --tis-clip 5 --mis-level sequence", {"tis_clip": 5.0, "mis_level": "sequence"}),
        ("--corrections veto --veto-threshold 0.1", {"veto_threshold": 0.1}),
        ("--corrections opsm --opsm-delta 0.1", {"opsm_delta": 0.1}),
        ("--corrections mis --mis-clip 0.4", {"mis_clip": 0.4}),
    ],
)
def test_options_that_reach_a_correction_are_accepted(line: str, options: dict[str, object]) -> None:
    assert resolved(line).plugin_options["offpolicy"] == OffPolicyOptions(**options)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--corrections tis --tis-clip-low 3", {"tis_clip_low"}),
        ("--corrections mis --mis-mode clip --mis-clip 0.4", {"mis_clip_low"}),
        ("--corrections mis --mis-clip-low 0.3", {"mis_clip_low"}),
        ("--corrections tis --mis-level sequence", {"mis_level"}),
        ("--corrections mis veto --tis-clip 5", {"tis_clip"}),
        ("--corrections tis --opsm-delta 0.1", {"opsm_delta"}),
        ("--corrections veto --veto-threshold 0", {"veto_threshold"}),
        ("--tis-clip 3", {"tis_clip"}),
        ("--use-tis --tis-threshold 0.9 --tis-clip 3", {"tis_threshold"}),
    ],
)
def test_options_that_are_wrong_or_do_nothing_are_refused(line: str, settings: set[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(line)
    assert caught.value.keys == {f"offpolicy.{setting}" for setting in settings}


@pytest.mark.parametrize("section", ["algorithm", "offpolicy"])
def test_the_plugins_section_of_a_file_and_that_of_older_files_are_read(tmp_path: Path, section: str) -> None:
    file = tmp_path / "run.toml"
    table = "" if section == "algorithm" else f"[{section}]\n"
    file.write_text(f'[algorithm]\nadvantage_estimator = "grpo"\ncorrections = ["tis"]\n{table}tis_clip = 3.0\n')
    from_file, active = resolve(["--config", str(file)])
    assert from_file.plugin_options["offpolicy"] == OffPolicyOptions(tis_clip=3.0)
    assert "offpolicy" in {plugin.name for plugin in active.registry.plugins}
    file.write_text(to_toml(from_file))
    assert resolve(["--config", str(file)])[0].plugin_options == from_file.plugin_options


def test_the_table_of_a_plugin_that_is_left_out_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[offpolicy]\ntis_clip = 2.0\n")
    without = resolved(f"--config {file} --no-plugin offpolicy")
    assert not any("tis_clip" in key for key in without.provenance)


# --- slime's flags for truncated importance sampling ------------------------------------------------------------------


def test_use_tis_comes_before_corrections_that_are_named_and_tis_threshold_is_its_upper_bound() -> None:
    alone = resolved("--use-tis --tis-threshold 0.9")
    options = alone.plugin_options["offpolicy"]
    assert isinstance(options, OffPolicyOptions)
    assert (alone.config.algorithm.corrections, options.largest_ratio) == (("tis",), 0.9)
    assert resolved("--use-tis --corrections veto").config.algorithm.corrections == ("tis", "veto")


def test_a_function_that_corrects_instead_of_tis_replaces_the_correction(tmp_path: Path) -> None:
    names = "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"
    (tmp_path / "mine.py").write_text(f"def correct(*, {names}):\n    return pg_loss, loss_masks, {{}}\n")
    with pytest.raises(ConfigError, match="custom_tis_function_path"):
        resolved(f"--use-tis --custom-tis-function-path {tmp_path}/mine.py")
