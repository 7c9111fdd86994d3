"""``slime run --plugin searchr1`` on real engines: its own model searches the embedded index and is trained."""

from __future__ import annotations

from itertools import groupby

import pytest

from tests.e2e.conftest import Finished, slime

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("search") / "run"
    size = ("--num-rollout", "1", "--rollout-batch-size", "16", "--num-token-samples", "128")
    where = ("--device", "cpu", "--output-dir", folder, "--progress", "lines")
    run = slime(folder, "run", "--plugin", "searchr1", *size, *where, "--no-eval")
    assert run.code == 0, run.errors + run.output
    return run


def test_the_trained_model_gives_every_token_the_log_probability_of_the_engine(run: Finished) -> None:
    (row,) = [one for one in run.rows if "train/train_rollout_logprob_max_diff" in one]
    assert row["train/train_rollout_logprob_max_diff"] < 1e-4


def test_search_results_are_not_trained(run: Finished) -> None:
    rows = run.samples("train-000000.jsonl")
    counts = [row["metadata"]["search_r1"] for row in rows]
    assert {one["searches"] for one in counts} >= {1, 2}
    assert sum(one["failures"] for one in counts) == 0
    for row, count in zip(rows, counts, strict=True):
        assert row["response"].count("<information>") >= count["searches"]  # the model may write one itself
        spans = [mask for mask, _ in groupby(row["loss_mask"])]
        assert spans == [1, 0] * (count["searches"] + count["invalid"]) + [1]
        log_probs = zip(row["rollout_log_probs"], row["loss_mask"], strict=True)
        assert {one for one, is_sampled in log_probs if not is_sampled} <= {0.0}


def test_the_reward_is_the_right_answer_and_the_form(run: Finished) -> None:
    (row,) = [one for one in run.rows if "search_r1/searches" in one]
    counts = [one["metadata"]["search_r1"] for one in run.samples("train-000000.jsonl")]
    for name in ("searches", "failures", "invalid"):
        assert row[f"search_r1/{name}"] == pytest.approx(sum(one[name] for one in counts) / len(counts))
    assert row["rollout/raw_reward"] == pytest.approx(
        0.8 * row["search_r1/exact_match"] + 0.2 * row["search_r1/format"]
    )
    assert row["search_r1/format"] > 0.9
    assert 0 < row["search_r1/exact_match"] < 0.4
