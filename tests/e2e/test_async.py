"""A run that generates one rollout ahead, live, and resumed from its checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import BRIEF, Finished, train

AHEAD = (*BRIEF, "--async-buffer-size", "1", "--max-staleness", "2", "--lr", "0.0001")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three steps with a checkpoint after the second, then two more from that one."""
    folder = tmp_path_factory.mktemp("runs") / "ahead"
    train(folder, "--num-rollout", "5", "--save-interval", "2", "--stop-after-test", *AHEAD)
    return train(folder, "--num-rollout", "5", "--load", folder / "checkpoints" / "step-000002")


def test_samples_are_a_rollout_old(run: Finished) -> None:
    assert [row["rollout/staleness/max"] for row in run.rows] == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_placeholder(run: Finished) -> Any:
    assert json
