"""slime's own flags for truncated importance sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import resolve
from slime_core.errors import ConfigError
from slime_offpolicy.options import OffPolicyOptions


def test_use_tis_selects_the_correction_and_tis_threshold_is_its_upper_bound():
    resolved, _ = resolve(["--plugin", "grpo", "--use-tis", "--tis-threshold", "0.9"])
    options = resolved.plugin_options["offpolicy"]
    assert isinstance(options, OffPolicyOptions)
    assert (resolved.config.algorithm.corrections, options.largest_ratio) == (("tis",), 0.9)


def test_use_tis_comes_before_corrections_that_are_named():
    resolved, _ = resolve(["--plugin", "grpo", "--use-tis", "--corrections", "veto"])
    assert resolved.config.algorithm.corrections == ("tis", "veto")


def test_both_names_of_the_bound_are_refused():
    with pytest.raises(ConfigError, match="tis_threshold"):
        resolve(["--plugin", "grpo", "--use-tis", "--tis-threshold", "0.9", "--tis-clip", "3"])


def test_a_function_that_corrects_in_place_of_tis_replaces_the_correction(tmp_path: Path):
    names = "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"
    (tmp_path / "mine.py").write_text(f"def correct(*, {names}):\n    return pg_loss, loss_masks, {{}}\n")
    with pytest.raises(ConfigError, match="custom_tis_function_path"):
        resolve(["--plugin", "grpo", "--use-tis", "--custom-tis-function-path", f"{tmp_path}/mine.py"])
