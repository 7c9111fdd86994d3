"""A run on an external engine, whose evaluations have an engine of their own."""

from __future__ import annotations

import psutil
import pytest

from slime_core.weights.engine_control import call
from tests.e2e.conftest import Finished, train

BRIEF = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rm-type", "1.0*exact_match")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, on_external: tuple[str, str]) -> Finished:
    """Two steps, with an evaluation before and after each and a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    steps = ("--num-rollout", "2", "--eval-interval", "1", "--save-interval", "1", "--seed", "3")
    words = (*steps, "--eval-num-gpus", "1", *on_external)
    return train(folder, *BRIEF, *words)


def test_every_evaluation_is_in_the_row_of_its_weights_which_stay_until_it_has_ended(run: Finished) -> None:
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert all("perf/eval_waited_time" in row for row in run.rows[:2])
    for step, row in enumerate(run.rows):
        assert row["eval/weight_version"] == step
        samples = run.samples(f"eval-arithmetic-{step:06d}.jsonl")
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(step),)}
        mean = sum(sample["reward"] for sample in samples) / len(samples)
        assert (row["eval/arithmetic"], row["eval/arithmetic/reward_parts/exact_match"]) == pytest.approx((mean, mean))


def test_the_start_weights_score_as_they_do_on_the_policys_engines(run: Finished, trained: Finished) -> None:
    name = "eval-arithmetic-000000.jsonl"
    assert [one["response"] for one in run.samples(name)] == [one["response"] for one in trained.samples(name)]


def test_the_policys_router_does_not_know_the_engine(run: Finished) -> None:
    logs = {path.stem for path in (run.folder / "logs").iterdir()}
    assert {"eval-engine-0", "router"} <= logs
    assert not {"engine-0", "router-eval"} & logs


def test_the_external_engine_has_the_last_weights_and_outlives_the_run(
    run: Finished, external: tuple[psutil.Popen, str]
) -> None:
    server, url = external
    assert server.is_running()
    assert call(url, "/model_info", timeout_s=30)["weight_version"] == "2"
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in run.rows[:2])
