"""Failed samples: the effect on their group, and their counts."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.config.sampling import RolloutConfig
from slime_core.rollout.collected_rollout import CollectedRollout, Staleness
from slime_core.rollout.evaluation import pass_rates, scores
from slime_core.rollout.transforms import Transforms
from slime_core.types import PromptGroup, Sample, Status


def group(number: int, *causes: str | None) -> PromptGroup:
    """Completed samples, and failed ones where a cause is given."""
    found = [Sample(group_index=number, index=2 * number + place) for place in range(len(causes))]
    for sample, cause in zip(found, causes, strict=True):
        sample.status = Status.COMPLETED if cause is None else Status.FAILED
        sample.reward, sample.failure_cause = (1.0, None) if cause is None else (None, cause)
    return found


GROUPS = (group(0, None, None), group(1, None, "engine_timeout"), group(2, "engine_timeout", "a b"))


def batch(wanted: int, failed_samples: Any = "drop_sample") -> CollectedRollout:
    return CollectedRollout(
        0,
        RolloutConfig(rollout_batch_size=wanted, failed_samples=failed_samples),
        transforms=Transforms(),
        staleness=Staleness(),
        prompts=None,  # type: ignore[arg-type]
        components=None,  # type: ignore[arg-type]
        generator=None,
    )


@pytest.fixture(params=["drop_sample", "drop_group"])
def collected(request: pytest.FixtureRequest) -> CollectedRollout:
    found = batch(3, request.param)
    found.take(GROUPS)
    return found


def test_a_failed_sample_is_never_trained_and_takes_its_group_along_where_the_run_says_so(collected, request):
    drops = "drop_group" in request.node.name
    assert [sample.index for sample in collected.trained] == ([0, 1] if drops else [0, 1, 2])
    assert collected.num_dropped == ({"failed_sample": 1} if drops else {})
    # A dropped group is replaced; one of which nothing is left is not.
    assert collected.missing == (1 if drops else 0)


def test_failures_are_counted_by_cause(collected):
    metrics = collected.metrics(collected.trained)
    found = {name: value for name, value in metrics.items() if name.startswith("rollout/failures/")}
    assert found == {"rollout/failures/engine_timeout": 2.0, "rollout/failures/other": 1.0}


def test_siblings_of_one_generation_count_once_in_pass_rates_as_in_evaluations():
    samples = [
        Sample(group_index=0, index=0, rollout_id=0, reward=0.0),
        Sample(group_index=0, index=0, rollout_id=0, reward=1.0),
        Sample(group_index=0, index=1, reward=0.0),
    ]
    for sample in samples:
        sample.status = Status.COMPLETED
    found = batch(1)
    found.take([samples])
    assert found.solved(1.0) == [[True, False]]
    evaluated = scores(samples, "e", key=None)
    assert pass_rates(found.solved(1.0)) == {k: evaluated[f"e-pass@{k}"] for k in (1, 2)} == {1: 0.5, 2: 1.0}
