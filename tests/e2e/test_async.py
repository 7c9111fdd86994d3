"""A run that generates one rollout ahead, and its resume from a checkpoint that holds the groups ahead."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

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


def groups(run: Finished, rollout: int) -> set[int]:
    """The prompt groups of one rollout."""
    return {sample["group"] for sample in run.samples(f"train-{rollout:06d}.jsonl")}


def held(run: Finished, step: int) -> set[int]:
    """The prompt groups that a checkpoint holds in addition to the state of the data source."""
    cursor = run.cursor(step)
    texts = cursor["in_flight"] + cursor["finished"]
    return {json.loads(text)["samples"][0]["group_index"] for text in texts}


def test_every_rollout_but_the_last_has_one_rollout_ahead_and_no_sample_is_above_the_bound(runs: Twice) -> None:
    rows = runs.whole.rows[:4]
    assert [row["rollout/buffer/in_flight"] + row["rollout/buffer/finished"] for row in rows] == [8.0, 8.0, 8.0, 0.0]
    assert rows[0]["rollout/staleness/max"] == 0.0
    assert rows[0]["parity/tokens"] == rows[0]["rollout/response_tokens"]
    assert rows[0]["parity/max"] < 1e-3
    for rollout, row in enumerate(rows):
        assert row["rollout/staleness/requeued"] == 0.0
        samples = runs.whole.samples(f"train-{rollout:06d}.jsonl")
        ages = [rollout - min(map(int, sample["weight_versions"])) for sample in samples]
        assert max(ages) <= 2
        figures = row["rollout/staleness/max"], row["rollout/staleness/mean"]
        assert figures == pytest.approx((max(ages), sum(ages) / len(ages)))


def test_a_checkpoint_holds_what_is_ahead(runs: Twice) -> None:
    trained = groups(runs.whole, 0) | groups(runs.whole, 1)
    assert (len(trained), len(held(runs.whole, 2))) == (16, 8)
    assert trained | held(runs.whole, 2) == set(range(24))
    next_prompts = [runs.whole.cursor(step)["source"]["next"] for step in (2, 4)]
    assert (next_prompts, held(runs.whole, 4)) == ([24, 32], set())  # the last rollout has none ahead


def test_resumed_every_prompt_is_trained_exactly_once(runs: Twice) -> None:
    trained = [number for rollout in range(4) for number in groups(runs.resumed, rollout)]
    assert sorted(trained) == list(range(32))
    finished = [json.loads(text)["samples"] for text in runs.whole.cursor(2)["finished"]]
    later = [one for rollout in (2, 3) for one in runs.resumed.samples(f"train-{rollout:06d}.jsonl")]
    responses = {one["index"]: one["response"] for one in later}
    assert all(responses[one["index"]] == one["response"] for group in finished for one in group)


def test_resumed_steps_weights_and_schedule_are_those_of_the_whole_run(runs: Twice) -> None:
    whole, resumed = runs.whole.rows, runs.resumed.rows
    assert [row["step"] for row in resumed] == [row["step"] for row in whole] == [0, 1, 2, 3, 4]
    assert resumed[2]["eval/arithmetic"] == pytest.approx(whole[2]["eval/arithmetic"], abs=ONE_ANSWER)
    assert [row["train/lr"] for row in resumed[:4]] == [row["train/lr"] for row in whole[:4]]
