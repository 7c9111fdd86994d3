"""The agent of examples/openai_agent, which knows only OpenAI's client, trained on the real engines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Finished, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent"
LOGGED = ("--sglang-log-requests", "--sglang-log-requests-level", "3", "--sglang-log-requests-format", "json")
"""The engine writes the ids of every request to its log."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("agent") / "run"
    words = ("--config", EXAMPLE / "run.toml", "--eval-interval", "none", *LOGGED)
    return train(folder, *words, "--num-rollout", "2", "--rollout-batch-size", "8", "--num-token-samples", "64")


def test_the_trained_model_gives_every_token_the_log_probability_of_the_engine(run: Finished) -> None:
    rows = [row for row in run.rows if "train/train_rollout_logprob_max_diff" in row]
    assert len(rows) == 2
    assert all(row["train/train_rollout_logprob_max_diff"] < 1e-4 for row in rows)
    assert all(row["agents/edited"] == row["agents/truncated"] == 0 for row in rows)


def test_what_is_trained_is_turn_by_turn_what_the_engine_was_sent_and_answered(run: Finished) -> None:
    lines = (run.folder / "logs" / "engine-0.log").read_text().splitlines()
    requests = [json.loads(line[line.index("{") :]) for line in lines if '"event": "request.finished"' in line]
    answered = Counter(_answered(one) for one in requests)
    rows = [row for step in range(2) for row in run.samples(f"train-{step:06}.jsonl")]
    trained = Counter(turn for row in rows for turn in _turns(row))
    assert len(rows) == 128
    assert trained.total() > 150
    assert trained <= answered


Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""The ids that were sent, those that were sampled, and their log-probabilities."""


def _answered(request: dict[str, Any]) -> Turn:
    sampled = request["out"]["meta_info"].get("output_token_logprobs") or []
    assert not sampled or [one[1] for one in sampled] == request["out"]["output_ids"]
    return tuple(request["obj"]["input_ids"]), tuple(one[1] for one in sampled), tuple(one[0] for one in sampled)


def _turns(row: dict[str, Any]) -> Iterator[Turn]:
    """The turns of a sample: the spans of its response that are trained."""
    start = len(row["tokens"]) - len(row["loss_mask"])
    at = 0
    for trains, span in groupby(row["loss_mask"]):
        end = at + len(list(span))
        if trains:
            ids, log_probs = row["tokens"][start + at : start + end], row["rollout_log_probs"][at:end]
            yield tuple(row["tokens"][: start + at]), tuple(ids), tuple(log_probs)
        at = end


def test_the_reward_is_what_the_agent_returns_of_the_turns_that_it_read(run: Finished) -> None:
    rows = run.samples("train-000000.jsonl")
    assert len(rows) == 64
    for row in rows:
        question = row["prompt"][0]["content"]
        # The built-in template writes no end of a turn that is decoded, so turns are distinguished by the question.
        first, _, second = row["response"].partition(question)
        if row["reward"] == 1.0:
            assert row["response"] == row["label"]
        else:
            assert first != row["label"]
            assert row["reward"] == (0.5 if second == row["label"] else 0.0)
    assert {row["reward"] for row in rows} >= {0.0, 1.0}
