"""Conflicts between data source, generate function, rewards, estimator and corrections are refused."""

from __future__ import annotations

import pytest

from slime_core import Kind
from slime_core.config.load import load
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.selection import check_selection

LABELS = "--advantage-estimator sft --generate-function from_label --n-samples-per-prompt 1"
CORE = "plugin 'core' (slime-rl 0.1.0, entry point slime_core.builtin.plugin)"
GRPO = "plugin 'grpo' (slime-grpo 0.1.0, entry point slime_grpo.plugin)"


def check(line: str) -> None:
    registry = activate(["grpo", "ppo", "compat", "offpolicy"]).registry
    resolved = load(line.split(), plugin_options=registry.options, derive=registry.derived, check_rules=False)
    check_selection(resolved.config, registry, trains=True)


def refused(line: str) -> str:
    with pytest.raises(PluginError) as caught:
        check(line)
    return str(caught.value)


# --- Tokens that no engine sampled ------------------------------------------------------------------------------------

UNKNOWN = (
    f"generate_function = from_label: the responses of 'from_label' of {CORE} are not sampled by an engine, so that "
    "no engine gives their log-probabilities, which are read by "
)


@pytest.mark.parametrize(
    ("line", "readers"),
    [
        ("", "parity_interval = 1"),
        ("--parity-interval 0 --corrections tis opsm", "corrections = tis"),
        ("--parity-interval 0 --use-rollout-logprobs", "use_rollout_logprobs = true"),
        ("--parity-interval 0 --get-mismatch-metrics", "get_mismatch_metrics = true"),
        ("--parity-interval 0 --use-rollout-routing-replay", "use_rollout_routing_replay = true"),
        ("--parity-interval 0 --custom-tis-function-path mine.py:tis", "custom_tis_function_path = "),
        ("--true-on-policy-mode", "true_on_policy_mode = true, parity_interval = 1"),
    ],
)
def test_log_probs_that_no_engine_gives_are_read_by_nothing(line, readers):
    message = refused(f"{LABELS} {line}")
    assert message.startswith(UNKNOWN + readers)
    assert message.endswith(". Leave these out (--parity-interval 0), or choose another generate function.")


@pytest.mark.parametrize(
    "line",
    [
        f"{LABELS} --parity-interval 0",
        f"{LABELS} --parity-interval 0 --corrections opsm",
        f"{LABELS} --debug-rollout-only",
        f"{LABELS} --load-debug-rollout-data r.jsonl",
        "--advantage-estimator grpo --corrections tis --get-mismatch-metrics",
        f"{LABELS} --rollout-function-path mine.py:rollout",
    ],
)
def test_components_that_read_no_engine_log_probs_are_accepted(line):
    check(line)


def test_stale_samples_are_corrected_by_a_correction_that_compares_engines():
    line = "--advantage-estimator grpo --max-staleness 1 --stale-samples correct"
    assert refused(f"{line} --corrections opsm") == (
        "stale_samples = correct trains samples above max_staleness, and of corrections = opsm none compares the "
        "learner with the engine that sampled them. Name one that does, such as --corrections tis, or choose "
        "--stale-samples requeue or evict."
    )
    check(f"{line} --corrections opsm tis")
    check(f"{line} --corrections opsm --use-rollout-logprobs")


ALIKE = f"generate_function = from_label: 'from_label' of {CORE} gives every sample of a group the same response, and "


def test_copies_of_one_answer_are_not_trained():
    line = "--advantage-estimator sft --generate-function from_label --parity-interval 0"
    assert refused(line) == (
        f"{ALIKE}n_samples_per_prompt = 8 would train as many equal copies of each. Give --n-samples-per-prompt 1."
    )
    assert refused(line.replace("sft", "grpo")) == (
        f"{ALIKE}'grpo' of {GRPO} learns from how the rewards of a group differ. Choose an estimator that reads no "
        "groups, such as --advantage-estimator sft, or another generate function."
    )
    check(f"{line} --debug-rollout-only")


# --- What learns from rewards -----------------------------------------------------------------------------------------


def test_a_group_of_one_is_compared_with_nothing():
    assert refused("--advantage-estimator rloo --n-samples-per-prompt 1") == (
        f"n_samples_per_prompt = 1: 'rloo' of {GRPO} compares the rewards within a group, and a group of one has "
        "nothing to compare, so that nothing would be learned. Give --n-samples-per-prompt at least 2, or choose an "
        "estimator that reads no groups."
    )


@pytest.mark.parametrize(
    "line",
    [
        "--advantage-estimator grpo --n-samples-per-prompt 2",
        "--advantage-estimator ppo --n-samples-per-prompt 1",
        "--advantage-estimator reinforce_plus_plus_baseline --n-samples-per-prompt 1",
        "--advantage-estimator grpo --n-samples-per-prompt 1 --use-opd",
        "--advantage-estimator grpo --n-samples-per-prompt 1 --debug-rollout-only",
        "--advantage-estimator grpo --n-samples-per-prompt 1 --load-debug-rollout-data r.jsonl",
        "--advantage-estimator grpo --n-samples-per-prompt 1 --custom-reward-post-process-path mine.py:shaped",
    ],
)
def test_a_group_of_one_is_accepted_where_something_else_is_learned_from(line):
    check(line)


def test_rewards_that_are_all_equal_teach_nothing():
    assert refused("--advantage-estimator grpo --rm-type zero") == (
        f"rm_type = zero: 'zero' of {CORE} gives every response the same reward, and 'grpo' of {GRPO} has nothing else "
        "to learn from. Choose a reward model with --rm-type, distil a teacher with --use-opd, or choose an estimator "
        "that reads no rewards, such as --advantage-estimator sft. A generate function that rewards its samples says "
        "so with GenerateTraits(rewards=True)."
    )


@pytest.mark.parametrize(
    "line",
    [
        "--advantage-estimator grpo --use-opd",
        "--advantage-estimator sft",
        "--advantage-estimator grpo --sample-transforms punish_overlong",
        "--advantage-estimator ppo --kl-coef 0.1",
        "--custom-advantage-function-path mine.py:own",
        "--advantage-estimator grpo --debug-rollout-only",
        "--advantage-estimator grpo --load-debug-rollout-data r.jsonl",
        "--advantage-estimator grpo --rollout-sample-hook-path mine.py:reward",
    ],
)
def test_equal_rewards_are_accepted_where_something_else_is_learned_from(line):
    check(f"{line} --rm-type zero")


def test_a_generate_function_by_path_may_reward_its_samples():
    traits = activate(["compat"]).registry.find(Kind.GENERATE_FUNCTION, "custom_generate_function_path").traits
    assert traits.rewards  # type: ignore[union-attr]
