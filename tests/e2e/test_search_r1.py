"""The plugin searchr1 as a user starts it: real engines, searches in the embedded index, a step of training.

The model has random weights and the tokenizer of the invented world: it writes tags by chance, often enough that some
turns search, most have no action, and some never end.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_searchr1.world.recipe import model_files
from slime_searchr1.world.task import data_files, tokenizer_files, write_files
from tests.e2e.conftest import NO_EVAL, Finished, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("search")
    write_files(folder / "data", files=data_files())
    write_files(folder / "model", files={**model_files(), **tokenizer_files()})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    model.save_pretrained(folder / "model")
    write_files(folder / "model", files=model_files())
    data = ("--hf-checkpoint", folder / "model", "--prompt-data", folder / "data" / "train.jsonl")
    size = ("--num-rollout", "1", "--rollout-batch-size", "8", "--rollout-max-response-len", "160")
    return train(folder / "run", "--plugin", "searchr1", *data, *size, *NO_EVAL, "--num-token-samples", "64")


def test_the_trained_model_gives_every_token_the_log_probability_of_the_engine(run: Finished) -> None:
    (row,) = [one for one in run.rows if "train/train_rollout_logprob_max_diff" in one]
    assert row["train/train_rollout_logprob_max_diff"] < 1e-4


def test_some_turns_search_and_what_they_find_is_not_trained(run: Finished) -> None:
    rows = run.samples("train-000000.jsonl")
    counts = [row["metadata"]["search_r1"] for row in rows]
    assert sum(one["searches"] for one in counts) > 0
    assert sum(one["failures"] for one in counts) == 0
    for row, count in zip(rows, counts, strict=True):
        mask = "".join(map(str, row["loss_mask"]))
        added = [text for text in mask.split("1") if text]
        told = count["searches"] + count["invalid"]  # the last turn is told nothing
        assert len(added) in (told, told - 1)
        log_probs = zip(row["rollout_log_probs"], row["loss_mask"], strict=True)
        assert {one for one, is_sampled in log_probs if not is_sampled} <= {0.0}


def test_searches_and_turns_without_an_action_are_logged(run: Finished) -> None:
    (row,) = [one for one in run.rows if "search_r1/searches" in one]
    counts = [one["metadata"]["search_r1"] for one in run.samples("train-000000.jsonl")]
    for name in ("searches", "failures", "invalid"):
        assert row[f"search_r1/{name}"] == pytest.approx(sum(one[name] for one in counts) / len(counts))
    assert row["rollout/raw_reward"] == pytest.approx(
        0.8 * row["search_r1/exact_match"] + 0.2 * row["search_r1/format"]
    )
