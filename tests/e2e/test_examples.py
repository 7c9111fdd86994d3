"""The worked examples, each from its own file for two steps, on real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Finished, train, weights

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"
MODEL = REPO / "slime_core" / "builtin" / "arithmetic" / "model"
BRIEF = ("--num-rollout", "2", "--rollout-batch-size", "8", "--device", "cpu")
NO_EVAL = ("--eval-prompt-data", "none", "--eval-interval", "none")
ALL = {"python_tool", "solve_and_select", "evaluation_tasks", "sft_then_rl", "distillation", "asynchronous", "mismatch"}


def example(folder: Path, file: str, *words: str | Path) -> Finished:
    return train(folder / "run", "--config", EXAMPLES / file, *BRIEF, *words)


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The first run of sft_then_rl; its model is the teacher of distillation too."""
    return example(tmp_path_factory.mktemp("sft"), "sft_then_rl/sft.toml", *NO_EVAL, "--save-interval", "2")


def model(run: Finished) -> Path:
    return run.folder / "checkpoints" / "step-000002" / "hf"


def test_every_example_is_run_here_or_in_a_test_of_its_own() -> None:
    there = {path.parent.name for path in EXAMPLES.rglob("*.toml")}
    assert there == ALL | {"arithmetic", "openai_agent", "search_r1", "smollm2"}


def test_python_tool(tmp_path: Path) -> None:
    run = example(tmp_path, "python_tool/run.toml", *NO_EVAL, "--n-samples-per-prompt", "4")
    rows = run.samples("train-000000.jsonl")
    assert not [row for row in rows if row["status"] == "failed"]
    rollouts: dict[int, list[float]] = {}
    for row in rows:
        rollouts.setdefault(row["index"], []).append(row["reward"])
    # Right at once, or right or wrong after what Python said.
    assert {tuple(rewards) for rewards in rollouts.values()} <= {(1.0,), (0.0, 1.0), (0.0, 0.0)}
    assert len(set(map(tuple, rollouts.values()))) > 1


def test_solve_and_select(tmp_path: Path) -> None:
    run = example(tmp_path, "solve_and_select/run.toml", *NO_EVAL, "--n-samples-per-prompt", "2")
    rows = run.samples("train-000000.jsonl")
    assert len(rows) == 8 * 2 * (4 + 1)
    assert run.rows[0]["agents/branches"] == 4
    assert run.rows[0]["train/train_rollout_logprob_max_diff"] < 1e-4


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
