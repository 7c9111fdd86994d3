"""The checkpoint of a run, converted: engines and transformers load it, and another run starts from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime_core.config.schema import ARITHMETIC
from slime_models.arguments import arguments
from slime_models.shape import read
from tests.e2e.conftest import BRIEF, Finished, slime, train, weights
from tests.engines.families import fresh_server_difference


@pytest.fixture(scope="module")
def converted(trained: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the run as a Hugging Face folder, which ``slime convert`` made of its torch_dist folder."""
    target = tmp_path_factory.mktemp("converted") / "hf"
    source = trained.checkpoint(2)
    done = slime(target, "convert", "torch-dist-to-hf", "--input-dir", source, "--output-dir", target)
    assert done.code == 0, done.errors
    return target


def test_the_converted_folder_is_the_one_that_the_run_saved(trained: Finished, converted: Path) -> None:
    saved = trained.checkpoint(2) / "hf"
    assert weights(converted) == weights(saved)
    assert {file.name for file in converted.iterdir()} == {file.name for file in saved.iterdir()}


def test_a_fresh_engine_of_the_converted_folder_computes_what_the_updated_engine_did(
    trained: Finished, converted: Path, tmp_path: Path
) -> None:
    assert fresh_server_difference(trained.folder, 2, converted, tmp_path / "log") < 1e-4


def test_transformers_computes_what_the_updated_engine_did(trained: Finished, converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    row = next(row for row in trained.samples("train-000002.jsonl") if row.get("rollout_log_probs"))
    ids, length = torch.tensor(row["tokens"]), row["response_length"]
    assert tokenizer.decode(ids[-length:], skip_special_tokens=True) == row["response"]
    with torch.no_grad():
        log_p_LV = model(ids[None]).logits[0, -length - 1 : -1].log_softmax(-1)
    log_probs = log_p_LV.gather(1, ids[-length:, None])[:, 0]
    assert log_probs.tolist() == pytest.approx(row["rollout_log_probs"], abs=1e-4)


@pytest.mark.long
def test_a_run_starts_from_a_torch_dist_folder_with_the_arguments_that_show_prints(
    trained: Finished, tmp_path: Path
) -> None:
    """Its --hf-checkpoint has other weights; a learning rate of zero keeps those that it starts with."""
    start = trained.checkpoint(2)
    config = json.loads((ARITHMETIC / "model" / "config.json").read_text())
    model = [text for name, value in arguments(read(config)) for text in (f"--{name}", value) if text is not None]
    assert "--num-layers" in model
    folders = ("--initial-megatron-checkpoint", start, "--ref-load", trained.checkpoint(4))
    reference = ("--use-kl-loss", "--kl-loss-type", "k3", "--lr", "0", "--num-rollout", "1")
    run = train(tmp_path / "run", *map(str, model), *folders, *reference, *BRIEF)
    assert weights(run.checkpoint(1) / "hf") == weights(start / "hf")
    assert run.rows[0]["train/train_rollout_logprob_max_diff"] < 1e-3
    assert run.rows[0]["train/kl_loss"] > 1e-6
