"""Sums of metrics that only some micro-batches, ranks or optimizer steps report."""

from __future__ import annotations

import pytest
import torch

from slime_core.learner import objective
from slime_core.learner.objective import MetricSums, average_metrics, reduce_metrics


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def sums(largest: float = 0.0, **values: float) -> MetricSums:
    found = {name: torch.tensor(value) for name, value in values.items()}
    return MetricSums(found, {"most": torch.tensor(largest)})


def test_micro_batches_are_added_up_and_the_largest_value_is_kept():
    assert reduce_metrics([sums(1.0, loss=1.0), sums(3.0, loss=0.5)], Group(1)) == {"loss": 1.5, "most": 3.0}
    assert reduce_metrics([], Group(2)) == {}


def test_ranks_that_report_other_metrics_add_them_up_by_name(monkeypatch):
    def gather(found, mine, *, group):
        found[:] = [mine, ({"theirs": 20.0, "loss": 10.0}, {"most": 5.0})]

    monkeypatch.setattr(objective.dist, "all_gather_object", gather)
    found = reduce_metrics([sums(2.0, ours=3.0, loss=1.0)], Group(2))
    assert found == {"loss": 11.0, "ours": 3.0, "theirs": 20.0, "most": 5.0}


def test_over_optimizer_steps_a_metric_that_one_does_not_report_counts_as_0():
    steps = [{"loss": 1.0, "x_max_diff": 2.0}, {"loss": 3.0, "x_max_diff": 1.0, "rare": 1.0}]
    assert average_metrics(steps) == {"loss": pytest.approx(2.0), "x_max_diff": 2.0, "rare": 0.5}
