"""A recorded rollout gives the stored losses, gradient norms and other metrics, whatever the CPU."""

from __future__ import annotations

import json

import pytest

from tests.golden.train_only import CASES, STORED, train

WANTED = json.loads(STORED.read_text())


@pytest.mark.parametrize("name", CASES)
def test_training_on_a_recorded_rollout_gives_the_stored_metrics(name: str) -> None:
    steps = [row["metrics"] for row in train(name)]
    assert len(steps) == len(WANTED[name])
    for step, wanted in zip(steps, WANTED[name], strict=True):
        assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)
