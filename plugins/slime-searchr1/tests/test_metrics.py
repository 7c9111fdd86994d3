"""What a rollout and an evaluation log of their searches."""

from __future__ import annotations

from slime_core import EvalSamples, Sample
from slime_searchr1.plugin import slime_log_evaluation, slime_log_rollout


def sample(searches: int, failures: int, reward: object) -> Sample:
    counts = {"searches": searches, "failures": failures, "invalid": 0}
    return Sample(metadata={"search_r1": counts}, reward=reward)


SAMPLES = [
    sample(1, 0, {"score": 1.0, "exact_match": 1.0, "format": 1.0}),
    sample(2, 1, {"score": 0.2, "exact_match": 0.0, "format": 1.0}),
    Sample(),  # failed: no engine answered
]


def test_a_rollout_logs_averages_over_its_responses() -> None:
    metrics = {"rollout/raw_reward": 0.6}
    slime_log_rollout(samples=SAMPLES, metrics=metrics)
    assert metrics == {
        "rollout/raw_reward": 0.6,
        "search_r1/searches": 1.5,
        "search_r1/failures": 0.5,
        "search_r1/invalid": 0.0,
        "search_r1/exact_match": 0.5,
        "search_r1/format": 1.0,
    }


def test_rewards_of_another_kind_add_none() -> None:
    metrics: dict[str, float] = {}
    slime_log_rollout(samples=[sample(1, 0, 0.5)], metrics=metrics)
    assert metrics == {"search_r1/searches": 1.0, "search_r1/failures": 0.0, "search_r1/invalid": 0.0}


def test_a_rollout_without_searches_logs_nothing() -> None:
    metrics: dict[str, float] = {}
    slime_log_rollout(samples=[Sample(reward={"exact_match": 1.0})], metrics=metrics)
    assert metrics == {}


def test_each_evaluation_set_has_its_own() -> None:
    metrics: dict[str, float] = {}
    sets = {"held_out": EvalSamples(SAMPLES[:1], [1.0], [False])}
    slime_log_evaluation(sets=sets, metrics=metrics)
    assert metrics["eval/held_out/search_r1/searches"] == 1.0
    assert metrics["eval/held_out/search_r1/exact_match"] == 1.0
