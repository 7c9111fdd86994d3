"""The agent of examples/openai_agent, which knows only OpenAI's client, trained on the real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("agent") / "run"
    words = ("--config", EXAMPLE / "run.toml", "--eval-interval", "none")
    return train(folder, *words, "--num-rollout", "2", "--rollout-batch-size", "8")


def test_the_trained_model_gives_every_token_the_log_probability_of_the_engine(run: Finished) -> None:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "train/train_rollout_logprob_max_diff" in row]
    assert len(found) == 2
    assert all(row["train/train_rollout_logprob_max_diff"] < 1e-4 for row in found)
    assert all(row["agents/edited"] == row["agents/truncated"] == 0 for row in found)


def test_the_reward_is_what_the_agent_returns_of_the_turns_that_it_read(run: Finished) -> None:
    rows = run.samples("train-000000.jsonl")
    assert len(rows) == 64
    for row in rows:
        question = row["prompt"][0]["content"]
        # The built-in template writes no end of a turn that is decoded, so turns are told apart by the question.
        first, _, second = row["response"].partition(question)
        if row["reward"] == 1.0:
            assert row["response"] == row["label"]
        else:
            assert first != row["label"]
            assert row["reward"] == (0.5 if second == row["label"] else 0.0)
    assert {row["reward"] for row in rows} >= {0.0, 1.0}
