"""Every column that a component reads is filled, and every setting has a component that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.learning import AlgorithmConfig, CriticConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.selection import check_selection

PLUGIN = """
from slime_core import AdvantageTraits, Component, hookimpl

@hookimpl
def slime_register_advantage_estimators():
    traits = AdvantageTraits({traits})
    yield Component("mine", target=f"{{__name__}}:Mine", traits=traits)
"""


def check(tmp_path: Path, traits: str, *, critic: CriticConfig | None = None, **algorithm) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(traits=traits))
    registry = activate([str(file), "offpolicy"]).registry
    algorithm = AlgorithmConfig(advantage_estimator="mine", **algorithm)
    check_selection(RunConfig(algorithm=algorithm, critic=critic or CriticConfig()), registry, trains=True)


def refuse(tmp_path: Path, traits: str, names: str, **given) -> None:
    with pytest.raises(PluginError, match=names):
        check(tmp_path, traits, **given)


def test_columns_that_are_filled_may_be_read(tmp_path):
    check(tmp_path, "reads={'rewards', 'groups', 'lengths', 'mask_sums'}")
    check(tmp_path, "scope='token', reads={'rewards', 'mask', 'lengths', 'rollout_log_probs'}", corrections=("tis",))
    check(tmp_path, "scope='token', reads={'rewards', 'kl'}", kl_coef=0.1)


@pytest.mark.parametrize(
    ("traits", "column", "filled"),
    [
        ("scope='token', reads={'rewards', 'qualities'}", "qualities", "'token' .* lengths, log_probs, mask, ref_log_"),
        ("reads={'rewards', 'values'}", "values", "'sample' .* groups, lengths, mask_sums, rewards, rollouts"),
        ("scope='token', reads={'groups'}", "groups", "'token' "),
        ("reads={'kl'}", "kl", "'sample' "),
        ("reads={'log_probs'}", "log_probs", "'sample' "),
    ],
)
def test_a_column_that_nothing_fills_is_refused(tmp_path, traits, column, filled):
    refuse(tmp_path, traits, f"'mine' of plugin 'mine' .* {column}, .*{filled}")


def test_an_unknown_correction_is_refused(tmp_path):
    refuse(tmp_path, "reads={'rewards'}", "'tiss'", corrections=("tiss",))


def test_a_divergence_that_no_estimator_subtracts_is_refused(tmp_path):
    refuse(tmp_path, "scope='token', reads={'rewards'}", "kl_coef = 0.25: .*'mine' .* kl.*--kl-coef", kl_coef=0.25)


def test_settings_of_a_critic_that_is_not_there_are_refused(tmp_path):
    given = CriticConfig(critic_lr=0.5, num_critic_only_steps=2)
    check(tmp_path, "scope='token', reads={'rewards', 'values'}", critic=given)
    check(tmp_path, "reads={'rewards'}", critic=CriticConfig())
    refuse(tmp_path, "reads={'rewards'}", "critic_lr = 0.5, num_critic_only_steps = 2: .* values", critic=given)


@pytest.mark.parametrize("setting", ["gamma", "lambd"])
def test_a_setting_that_the_estimator_does_not_read_is_refused(tmp_path, setting):
    check(tmp_path, f"reads={{{setting!r}}}", **{setting: 0.9})
    check(tmp_path, "", **{setting: 1.0})
    refuse(tmp_path, f"reads={ {'gamma', 'lambd'} - {setting} }", f"{setting} = 0.9: .*'mine' ", **{setting: 0.9})


# --- Corrections ------------------------------------------------------------------------------------------------------

READS = "reads={'rewards'}"


def test_a_correction_that_compares_nothing_goes_with_the_engine_s_log_probs(tmp_path):
    check(tmp_path, READS, corrections=("opsm",), use_rollout_logprobs=True)
    check(tmp_path, READS, normalize_advantages=True)


@pytest.mark.parametrize("correction", ["tis", "icepop", "mis", "veto"])
def test_a_correction_that_would_compare_the_engine_with_itself_is_refused(tmp_path, correction):
    names = rf"use_rollout_logprobs = true .*'{correction}' .*compares_engine=False"
    refuse(tmp_path, READS, names, corrections=(correction,), use_rollout_logprobs=True)
