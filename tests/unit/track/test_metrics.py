"""The numbers of one step."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.errors import NonFiniteError
from slime_core.track.track import Metrics


def test_numbers_become_floats_and_keep_their_order() -> None:
    metrics = Metrics({"train/loss": 1})
    metrics["rollout/raw_reward"] = np.float32(0.5)  # type: ignore[assignment]
    assert list(metrics.items()) == [("train/loss", 1.0), ("rollout/raw_reward", 0.5)]
    assert {type(value) for value in metrics.values()} == {float}


def test_a_name_given_twice_is_refused() -> None:
    metrics = Metrics({"train/loss": 0.5})
    with pytest.raises(ValueError, match=r"'train/loss' is already 0\.5"):
        metrics.update({"train/loss": 0.7})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"'train/grad_norm' is -?(nan|inf)"):
        Metrics({"train/grad_norm": value})


def test_a_metric_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="'train/loss' is a str"):
        Metrics({"train/loss": "0.5"})  # type: ignore[dict-item]


def test_parts_add_up() -> None:
    metrics = Metrics()
    metrics.add("perf/train_time", 1.5)
    metrics.add("perf/train_time", 0.25)
    assert dict(metrics) == {"perf/train_time": 1.75}
