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


def test_columns_that_are_filled_may_be_read(tmp_path):
    check(tmp_path, "reads={'rewards', 'groups', 'lengths', 'mask_sums'}")
    check(tmp_path, "scope='token', reads={'rewards', 'mask', 'lengths', 'rollout_log_probs'}", corrections=("tis",))
    check(tmp_path, "scope='token', reads={'rewards', 'kl'}", kl_coef=0.1)


@pytest.mark.parametrize(
    ("traits", "column", "filled"),
    [
        ("scope='token', reads={'rewards', 'qualities'}", "qualities", "'token' are lengths, log_probs, mask, "),
        ("reads={'rewards', 'values'}", "values", "'sample' are groups, lengths, mask_sums, rewards, rollouts. "),
        ("scope='token', reads={'groups'}", "groups", "'token' are lengths, log_probs, mask, ref_log_probs, rewards, "),
        ("reads={'kl'}", "kl", "'sample' are groups, lengths, mask_sums, rewards, rollouts. "),
        (
            "reads={'log_probs'}",
            "log_probs",
            "'sample' are groups, lengths, mask_sums, rewards, rollouts. Choose another ",
        ),
    ],
)
def test_a_column_that_nothing_fills_is_refused(tmp_path, traits, column, filled):
    with pytest.raises(PluginError) as caught:
        check(tmp_path, traits)
    message = str(caught.value)
    assert message.startswith("advantage estimator 'mine' of plugin ")
    assert f" reads {column}, which nothing fills; filled for scope {filled}" in message
    assert message.endswith("Choose another estimator, or a version of slime-rl that fills it.")


def test_an_unknown_correction_is_refused(tmp_path):
    with pytest.raises(PluginError, match="no active plugin offers a correction called 'tiss'"):
        check(tmp_path, "reads={'rewards'}", corrections=("tiss",))


def test_a_divergence_that_no_estimator_subtracts_is_refused(tmp_path):
    with pytest.raises(PluginError) as caught:
        check(tmp_path, "scope='token', reads={'rewards'}", kl_coef=0.25)
    assert str(caught.value).startswith("kl_coef = 0.25: no effect, because advantage estimator 'mine' of plugin ")
    assert str(caught.value).endswith(
        "chosen by advantage_estimator, does not read kl. Leave --kl-coef out, or choose another advantage estimator."
    )


def test_settings_of_a_critic_that_is_not_there_are_refused(tmp_path):
    given = CriticConfig(critic_lr=0.5, num_critic_only_steps=2)
    check(tmp_path, "scope='token', reads={'rewards', 'values'}", critic=given)
    check(tmp_path, "reads={'rewards'}", critic=CriticConfig())
    with pytest.raises(PluginError) as caught:
        check(tmp_path, "reads={'rewards'}", critic=given)
    assert str(caught.value).startswith("critic_lr = 0.5, num_critic_only_steps = 2: no effect, because advantage ")
    assert str(caught.value).endswith(
        " does not read values. Leave --critic-lr and --num-critic-only-steps out, or choose another advantage "
        "estimator."
    )


@pytest.mark.parametrize("setting", ["gamma", "lambd"])
def test_a_setting_that_the_estimator_does_not_read_is_refused(tmp_path, setting):
    check(tmp_path, f"reads={{{setting!r}}}", **{setting: 0.9})
    check(tmp_path, "", **{setting: 1.0})
    with pytest.raises(PluginError) as caught:
        check(tmp_path, f"reads={ {'gamma', 'lambd'} - {setting} }", **{setting: 0.9})
    assert str(caught.value).startswith(f"{setting} = 0.9: no effect, because advantage estimator 'mine' of plugin ")
    assert str(caught.value).endswith(
        f" does not read {setting}. Leave --{setting} out, or choose another advantage estimator."
    )


# --- Corrections ------------------------------------------------------------------------------------------------------

READS = "reads={'rewards'}"


def test_a_correction_that_compares_nothing_goes_with_the_engine_s_log_probs(tmp_path):
    check(tmp_path, READS, corrections=("opsm",), use_rollout_logprobs=True)
    check(tmp_path, READS, normalize_advantages=True)


@pytest.mark.parametrize("correction", ["tis", "icepop", "mis", "veto"])
def test_a_correction_that_would_compare_the_engine_with_itself_is_refused(tmp_path, correction):
    with pytest.raises(PluginError) as caught:
        check(tmp_path, READS, corrections=(correction,), use_rollout_logprobs=True)
    assert str(caught.value).startswith(
        "use_rollout_logprobs = true has the engine's log-probs in place of the learner's old ones, and corrections "
        f"name {correction!r} of "
    )
    assert str(caught.value).endswith(
        "which compares the two: every ratio would be 1. Leave one of them out. A correction that does not compare "
        "them says so with CorrectionTraits(compares_engine=False)."
    )
