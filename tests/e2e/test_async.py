"""A run that generates one rollout ahead, and its resume from a checkpoint that holds the groups ahead."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ONE_ANSWER, Finished, train

pytestmark = pytest.mark.long

SIZES = ("--num-rollout", "4", "--save-interval", "2", "--eval-interval", "2", "--skip-eval-before-train")
SMALL = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--lr", "0.0001")
AHEAD = (*SMALL, "--async-buffer-size", "1", "--max-staleness", "2")


@dataclass(frozen=True)
class Twice:
    """A run of four rollouts, and the same one resumed after its second."""

    whole: Finished
    resumed: Finished


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, on_external: tuple[str, str]) -> Twice:
    folder = tmp_path_factory.mktemp("ahead")
    whole = train(folder / "whole", *SIZES, *AHEAD, *on_external)
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


def held(run: Finished, step: int) -> set[int]:
    """The prompt groups that a checkpoint holds in addition to the state of the data source."""
    found = cursor(run.folder, step)
    texts = found["in_flight"] + found["finished"]
    return {json.loads(text)["samples"][0]["group_index"] for text in texts}


def test_every_rollout_but_the_last_has_one_rollout_ahead(runs: Twice) -> None:
    rows = runs.whole.rows[:4]
    assert [row["rollout/buffer/in_flight"] + row["rollout/buffer/finished"] for row in rows] == [8.0, 8.0, 8.0, 0.0]


def test_no_sample_is_above_the_bound(runs: Twice) -> None:
    rows = runs.whole.rows[:4]
    assert rows[0]["rollout/staleness/max"] == 0.0
    assert all(row["rollout/staleness/max"] <= 2.0 for row in rows)
    assert [row["rollout/staleness/requeued"] for row in rows] == [0.0] * 4
    for rollout, row in enumerate(rows):
        samples = runs.whole.samples(f"train-{rollout:06d}.jsonl")
        ages = [rollout - min(map(int, sample["weight_versions"])) for sample in samples]
        assert (max(ages), sum(ages) / len(ages)) == pytest.approx(
            (row["rollout/staleness/max"], row["rollout/staleness/mean"])
        )


def test_tokens_of_the_trained_weights_agree_with_the_learner(runs: Twice) -> None:
    first = runs.whole.rows[0]
    assert first["parity/tokens"] == first["rollout/response_tokens"]
    assert first["parity/max"] < 1e-3


def test_a_checkpoint_holds_what_is_ahead(runs: Twice) -> None:
    trained = groups(runs.whole, 0) | groups(runs.whole, 1)
    assert (len(trained), len(held(runs.whole, 2))) == (16, 8)
    assert trained | held(runs.whole, 2) == set(range(24))
    assert cursor(runs.whole.folder, 2)["source"]["next"] == 24


def test_the_last_rollout_has_none_ahead(runs: Twice) -> None:
    assert (held(runs.whole, 4), cursor(runs.whole.folder, 4)["source"]["next"]) == (set(), 32)


def test_resumed_every_prompt_is_trained_exactly_once(runs: Twice) -> None:
    trained = [number for rollout in range(4) for number in groups(runs.resumed, rollout)]
    assert sorted(trained) == list(range(32))
    finished = [json.loads(text)["samples"] for text in cursor(runs.whole.folder, 2)["finished"]]
    later = [one for rollout in (2, 3) for one in runs.resumed.samples(f"train-{rollout:06d}.jsonl")]
    responses = {one["index"]: one["response"] for one in later}
    assert all(responses[one["index"]] == one["response"] for group in finished for one in group)


def test_resumed_steps_weights_and_schedule_are_those_of_the_whole_run(runs: Twice) -> None:
    whole, resumed = runs.whole.rows, runs.resumed.rows
    assert [row["step"] for row in resumed] == [row["step"] for row in whole] == [0, 1, 2, 3, 4]
    assert resumed[2]["eval/arithmetic"] == pytest.approx(whole[2]["eval/arithmetic"], abs=ONE_ANSWER)
    assert [row["train/lr"] for row in resumed[:4]] == [row["train/lr"] for row in whole[:4]]
