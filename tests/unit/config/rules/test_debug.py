"""The rules of running one half alone: each broken once."""

from __future__ import annotations

from slime_core.config.load import load
from tests.unit.config.broken import blames, broken

LOAD = "--load-debug-rollout-data r-{rollout_id}.jsonl"


def test_the_embedded_run_does_not_ask_for_evaluations_where_nothing_could_be_evaluated() -> None:
    config = load(["--advantage-estimator", "toy", *LOAD.split()], check_rules=False).config
    assert (config.eval.eval_interval, config.evaluates, config.rollout.num_rollout) == (None, False, 80)
    assert (config.num_engines, config.num_started_ranks) == (0, 1)


def test_a_run_that_only_generates_has_engines_and_no_rank() -> None:
    config = load(["--advantage-estimator", "toy", "--debug-rollout-only"], check_rules=False).config
    assert (config.num_engines, config.num_started_ranks, config.num_data_ranks) == (1, 0, 1)


def test_saved_rollouts_replace_no_file_that_the_run_reads(tmp_path) -> None:
    (tmp_path / "my-3.jsonl").write_text("{}\n")
    line = f"--num-rollout 1 --rollout-max-response-len 8 --prompt-data {tmp_path}/my-3.jsonl"
    found = broken(f"{line} --save-debug-rollout-data {tmp_path}/my-{{rollout_id}}.jsonl")
    blames(found, "save_debug_rollout_data", f"{tmp_path}/my-3.jsonl ")


def test_only_what_slime_saved_is_replaced(tmp_path) -> None:
    from slime_core.rollout.rollout_files import Recorded, write_rollout

    line = f"--save-debug-rollout-data {tmp_path}/r-{{rollout_id}}.jsonl"
    write_rollout(tmp_path / "r-0.jsonl", Recorded(0, 1.0, []))
    (tmp_path / "r-.jsonl").write_text("notes of mine, not in the way")
    assert broken(line) == []
    (tmp_path / "r-1.jsonl").write_text("notes of mine")
    blames(broken(line), "save_debug_rollout_data", f"{tmp_path}/r-1.jsonl ")


def test_train_data_of_a_rank_is_distinguished_from_other_tensors(tmp_path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    path, line = tmp_path / "t.safetensors", f"--num-rollout 1 --save-debug-train-data {tmp_path}/t.safetensors"
    tensors = {"lengths_B": np.zeros(2, np.int64)}
    save_file(tensors, path, metadata={"steps": "[]" * 900, "format": "slime train data", "version": "1"})
    assert broken(line) == []
    save_file(tensors, path)
    blames(broken(line), "save_debug_train_data", f": {path} ")
