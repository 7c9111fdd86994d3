"""Every column that a component reads is filled, and every setting has a component that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_core.components.selection import check_selection
from slime_core.config.learning import AlgorithmConfig, CriticConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from tests.plugin_files import Site, activated

Check = Callable[..., None]


@pytest.fixture
def check(site: Site) -> Check:
    """Checks a run with an estimator ``mine`` that has these traits."""

    def run(traits: str, *, critic: CriticConfig | None = None, **algorithm: Any) -> None:
        source = "@hookimpl\ndef slime_register(add):\n    add.advantage_estimator('mine', 'x.y:Z', TRAITS)\n"
        registry = activated(site.file("mine", source.replace("TRAITS", traits)), "offpolicy")
        config = AlgorithmConfig(advantage_estimator="mine", **algorithm)
        check_selection(RunConfig(algorithm=config, critic=critic or CriticConfig()), registry, trains=True)

    return run


def refuse(check: Check, traits: str, names: str, **settings: Any) -> None:
    with pytest.raises(PluginError, match=names):
        check(traits, **settings)


def test_columns_that_are_filled_may_be_read(check: Check) -> None:
    check("reads={'rewards', 'groups', 'lengths', 'mask_sums'}")
    check("scope='token', reads={'rewards', 'mask', 'lengths', 'rollout_log_probs'}", corrections=("tis",))
    check("scope='token', reads={'rewards', 'kl'}", kl_coef=0.1)


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
def test_a_column_that_nothing_fills_is_refused(check: Check, traits: str, column: str, filled: str) -> None:
    refuse(check, traits, f"'mine' of plugin 'mine' .* {column}, .*{filled}")


def test_an_unknown_correction_is_refused(check: Check) -> None:
    refuse(check, "reads={'rewards'}", "'tiss'", corrections=("tiss",))


def test_a_divergence_that_no_estimator_subtracts_is_refused(check: Check) -> None:
    refuse(check, "scope='token', reads={'rewards'}", "kl_coef = 0.25: .*'mine' .* kl.*--kl-coef", kl_coef=0.25)


def test_settings_of_a_critic_that_is_not_there_are_refused(check: Check) -> None:
    given = CriticConfig(critic_lr=0.5, num_critic_only_steps=2)
    check("scope='token', reads={'rewards', 'values'}", critic=given)
    check("reads={'rewards'}", critic=CriticConfig())
    refuse(check, "reads={'rewards'}", "critic_lr = 0.5, num_critic_only_steps = 2: .* values", critic=given)


@pytest.mark.parametrize("setting", ["gamma", "lambd"])
def test_a_setting_that_the_estimator_does_not_read_is_refused(check: Check, setting: str) -> None:
    check(f"reads={{{setting!r}}}", **{setting: 0.9})
    check("", **{setting: 1.0})
    refuse(check, f"reads={ {'gamma', 'lambd'} - {setting} }", f"{setting} = 0.9: .*'mine' ", **{setting: 0.9})


# --- Corrections ------------------------------------------------------------------------------------------------------

READS = "reads={'rewards'}"


def test_a_correction_that_compares_nothing_goes_with_the_engine_s_log_probs(check: Check) -> None:
    check(READS, corrections=("opsm",), use_rollout_logprobs=True)
    check(READS, normalize_advantages=True)


@pytest.mark.parametrize("correction", ["tis", "icepop", "mis", "veto"])
def test_a_correction_that_would_compare_the_engine_with_itself_is_refused(check: Check, correction: str) -> None:
    names = rf"use_rollout_logprobs = true .*'{correction}' .*compares_engine=False"
    refuse(check, READS, names, corrections=(correction,), use_rollout_logprobs=True)
