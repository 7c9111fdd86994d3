"""The worked examples that ``make test-long`` leaves out, for two steps each: ``make worked-examples``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import NO_EVAL, Finished, train, weights

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"
MODEL = REPO / "slime_core" / "builtin" / "arithmetic" / "model"
BRIEF = ("--num-rollout", "2", "--rollout-batch-size", "8", "--device", "cpu")


def example(folder: Path, file: str, *words: str | Path) -> Finished:
    return train(folder / "run", "--config", EXAMPLES / file, *BRIEF, *words)


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The first run of sft_then_rl; its model is the teacher of distillation too."""
    return example(tmp_path_factory.mktemp("sft"), "sft_then_rl/sft.toml", *NO_EVAL, "--save-interval", "2")


def model(run: Finished) -> Path:
    return run.folder / "checkpoints" / "step-000002" / "hf"


def test_evaluation_tasks(tmp_path: Path) -> None:
    run = example(tmp_path, "evaluation_tasks/run.toml", "--eval-interval", "2")
    first, last = run.rows[0], run.rows[-1]
    assert {"eval/easy", "eval/hard", "eval/hard_sampled"} <= first.keys() & last.keys()
    assert first["eval/easy"] > first["eval/hard"]
    assert len(run.samples("eval-hard_sampled-000000.jsonl")) == 8 * 8


def test_sft_then_rl(tmp_path: Path, imitated: Finished) -> None:
    run = example(tmp_path, "sft_then_rl/rl.toml", "--hf-checkpoint", model(imitated), *NO_EVAL)
    assert all(row["train/loss"] > 0 for row in imitated.rows if "train/loss" in row)
    assert weights(model(imitated)) != weights(MODEL)
    assert 0 < run.rows[0]["rollout/raw_reward"] < 1


def test_distillation(tmp_path: Path, imitated: Finished) -> None:
    run = example(tmp_path, "distillation/run.toml", "--opd-teacher-load", model(imitated), *NO_EVAL)
    assert all(row["train/opd_reverse_kl"] != 0 for row in run.rows if "train/loss" in row)


def test_asynchronous(tmp_path: Path) -> None:
    run = example(tmp_path, "asynchronous/run.toml", *NO_EVAL)
    assert max(row["rollout/staleness/max"] for row in run.rows if "rollout/staleness/max" in row) >= 1


def test_mismatch(tmp_path: Path) -> None:
    run = example(tmp_path, "mismatch/run.toml", *NO_EVAL)
    assert all(row["train/train_rollout_logprob_abs_diff"] > 1e-5 for row in run.rows if "train/loss" in row)
