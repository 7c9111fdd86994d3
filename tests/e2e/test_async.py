"""A run that generates one rollout ahead, live, and resumed from a checkpoint that holds what was ahead."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BRIEF, Finished, train

AHEAD = (*BRIEF, "--async-buffer-size", "1", "--max-staleness", "2", "--lr", "0.0001")


@dataclass(frozen=True)
class Twice:
    """A run of four rollouts, and the same one resumed behind its second."""

    whole: Finished
    resumed: Finished


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    folder = tmp_path_factory.mktemp("ahead")
    whole = train(folder / "whole", "--num-rollout", "4", "--save-interval", "2", *AHEAD)
    shutil.copytree(whole.folder, folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "step-000004")
    return Twice(whole, train(folder / "resumed", "--load", folder / "resumed"))


def cursor(folder: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of ``step`` holds of the data."""
    state = json.loads((folder / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
    found: dict[str, Any] = state["cursor"]
    return found


def groups(run: Finished, rollout: int) -> set[int]:
    """The prompt groups of one rollout."""
    return {sample["group"] for sample in run.samples(f"train-{rollout:06d}.jsonl")}


def test_every_rollout_but_the_first_is_drawn_one_step_ahead(runs: Twice) -> None:
    assert [row["rollout/staleness/max"] for row in runs.whole.rows[:4]] == [0.0, 1.0, 1.0, 1.0]
    assert [row["rollout/staleness/requeued"] for row in runs.whole.rows[:4]] == [0.0] * 4
    for rollout in range(1, 4):
        versions = {
            version for one in runs.whole.samples(f"train-{rollout:06d}.jsonl") for version in one["weight_versions"]
        }
        assert str(rollout - 1) in versions <= {str(rollout - 1), str(rollout)}


def test_what_the_weights_drew_that_are_trained_is_compared_and_nothing_else(runs: Twice) -> None:
    tokens = [row["parity/tokens"] for row in runs.whole.rows[:4]]
    assert tokens[0] > 0
    assert runs.whole.rows[0]["parity/max"] < 1e-3


def test_a_checkpoint_holds_the_rollout_that_is_ahead(runs: Twice) -> None:
    held = cursor(runs.whole.folder, 2)
    ahead = [json.loads(text) for text in held["in_flight"] + held["finished"]]
    assert sorted(group["samples"][0]["group_index"] for group in ahead) == list(range(16, 24))
    assert held["source"]["next"] == 24
    assert {group["version"] for group in ahead} == {1}


def test_nothing_is_ahead_of_the_last_rollout(runs: Twice) -> None:
    held = cursor(runs.whole.folder, 4)
    assert (held["in_flight"], held["finished"], held["source"]["next"]) == ([], [], 32)


def test_resumed_every_prompt_is_trained_exactly_once(runs: Twice) -> None:
    assert [groups(runs.resumed, rollout) for rollout in range(4)] == [set(range(8 * n, 8 * n + 8)) for n in range(4)]
    finished = [json.loads(text)["samples"] for text in cursor(runs.whole.folder, 2)["finished"]]
    trained = {one["index"]: one["response"] for one in runs.resumed.samples("train-000002.jsonl")}
    kept = {one["index"]: one["response"] for group in finished for one in group}
    assert {index: trained[index] for index in kept} == kept
