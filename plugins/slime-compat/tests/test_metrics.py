"""slime's metrics of turns, categories and correct samples, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from slime_compat.metrics import rollout_metrics
from slime_compat.options import CompatOptions
from slime_compat.paths import PathOptions
from slime_compat.plugin import slime_log_rollout, slime_prepare
from slime_core import Sample, Status
from slime_core.components.construction import run_view
from slime_core.config.load import load


def options(**given: Any) -> PathOptions:
    """The options of a run that names no function."""
    made = CompatOptions(**given)
    return slime_prepare(run_view(load([], check_rules=False).config, {"compat": made}), made, {})


def sample(mask: list[int], reward: float | dict[str, float], log_probs: list[float], **more: Any) -> Sample:
    length: dict[str, Any] = {"tokens": [0, *mask], "response_length": len(mask), "loss_mask": mask}
    return Sample(**length, reward=reward, rollout_log_probs=log_probs, **more)


SAMPLES = [
    sample([1, 0, 1, 1], 1.0, [-1.0, 0.0, -2.0, -3.0], metadata={"kind": "easy"}),
    sample([1, 1], 0.0, [-1.0, -1.0], metadata={"kind": "hard", "round_number": 5}, status=Status.TRUNCATED),
    Sample(tokens=[1, 2, 3], response_length=2, reward=1.0, rollout_log_probs=[-4.0, -4.0], metadata={"kind": "easy"}),
    Sample(status=Status.FAILED),
]


def test_turns_and_lengths_with_and_without_the_output_of_tools() -> None:
    metrics = rollout_metrics(SAMPLES, options(log_multi_turn=True).plan.settings)
    lengths = "multi_turn/raw_response_length/response_length"
    assert metrics[f"{lengths}_mean"] == pytest.approx(8 / 3)
    assert (metrics[f"{lengths}_max"], metrics[f"{lengths}_min"], metrics[f"{lengths}_clip_ratio"]) == (4, 2, 1 / 3)
    assert metrics["multi_turn/wo_obs_response_length/response_length_max"] == 3
    rounds = "multi_turn/multi_turn_metric/round_number"
    assert (metrics[f"{rounds}_mean"], metrics[f"{rounds}_max"], metrics[f"{rounds}_min"]) == (8 / 3, 5, 1)


def test_categories_are_shares_of_a_named_reward_or_of_a_field_and_are_added_to_the_metrics() -> None:
    metrics = {"rollout/raw_reward": 1.0}
    assert not slime_log_rollout(0, SAMPLES, metrics, 1.0, options(log_reward_category="kind"))
    assert metrics == {"rollout/raw_reward": 1.0, "rollout/error_cat/easy": 2 / 3, "rollout/error_cat/hard": 1 / 3}
    named = [sample([1], {"acc": acc}, [-1.0]) for acc in (0.0, 0.0, 1.0, 0.0)]
    shares = rollout_metrics(named, options(log_reward_category="acc").plan.settings)
    assert shares == {"rollout/error_cat/0.0": 0.75, "rollout/error_cat/1.0": 0.25}


def test_correct_samples_have_their_lengths_and_their_surprise() -> None:
    assert rollout_metrics(SAMPLES, options(log_correct_samples=True).plan.settings) == {
        "rollout/correct_length/p25": 2,
        "rollout/correct_length/p50": 2,
        "rollout/correct_length/p75": 4,
        "rollout/correct_length/p100": 4,
        "rollout/correct_entropy": 3.0,  # (1 + 2 + 3) / 3 = 2 of the first, 4 of the third
    }
    assert rollout_metrics([sample([1], 0.5, [-1.0])], options(log_correct_samples=True).plan.settings) == {}


def test_a_run_without_these_flags_has_none_of_them() -> None:
    metrics: dict[str, float] = {}
    assert not slime_log_rollout(0, SAMPLES, metrics, 1.0, options())
    assert metrics == {}
