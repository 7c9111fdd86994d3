"""Conflicts between data source, generate function, rewards, estimator and corrections are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.activation import activate_peeked
from slime_core.components.selection import check_selection
from slime_core.config.load import load, peek
from slime_core.errors import PluginError

LABELS = "--advantage-estimator sft --generate-function from_label --n-samples-per-prompt 1"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()


def check(line: str) -> None:
    words = line.split()
    active = activate_peeked(peek(words), builds_model=False)
    resolved = load(words, **active.for_load, check_rules=False)
    check_selection(resolved.config, active.registry, trains=True)


def refuse(line: str, names: str) -> None:
    """Assert that the line is refused with a message that has ``names`` in this order."""
    with pytest.raises(PluginError, match=names):
        check(line)


# --- Tokens that no engine sampled ------------------------------------------------------------------------------------


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
def test_log_probs_that_no_engine_gives_are_read_by_nothing(line: str, readers: str) -> None:
    refuse(f"{LABELS} {line}", f"generate_function = from_label: .*'from_label' .* {readers}.*--parity-interval 0")


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
def test_components_that_read_no_engine_log_probs_are_accepted(line: str) -> None:
    check(line)


def test_stale_samples_are_corrected_by_a_correction_that_compares_engines() -> None:
    line = "--advantage-estimator grpo --max-staleness 1 --stale-samples correct"
    refuse(f"{line} --corrections opsm", "stale_samples = correct .*max_staleness.*corrections = opsm .* tis")
    check(f"{line} --corrections opsm tis")
    check(f"{line} --corrections opsm --use-rollout-logprobs")


def test_copies_of_one_answer_are_not_trained() -> None:
    line = "--advantage-estimator sft --generate-function from_label --parity-interval 0"
    refuse(line, r"'from_label' .*n_samples_per_prompt = 8 .*--n-samples-per-prompt 1\.")
    refuse(line.replace("sft", "grpo"), r"'from_label' .*'grpo' .*--advantage-estimator sft")
    check(f"{line} --debug-rollout-only")


# --- What learns from rewards -----------------------------------------------------------------------------------------


def test_a_group_of_one_is_compared_with_nothing() -> None:
    line = "--advantage-estimator rloo --n-samples-per-prompt 1"
    refuse(line, r"n_samples_per_prompt = 1: 'rloo' .*--n-samples-per-prompt at least 2")


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
def test_a_group_of_one_is_accepted_where_something_else_is_learned_from(line: str) -> None:
    check(line)


def test_rewards_that_are_all_equal_teach_nothing() -> None:
    refuse("--advantage-estimator grpo --rm-type zero", r"rm_type = zero: 'zero' .*'grpo' ")


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
def test_equal_rewards_are_accepted_where_something_else_is_learned_from(line: str) -> None:
    check(f"{line} --rm-type zero")
