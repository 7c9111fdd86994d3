"""Whole runs of families in layouts that differ in everything; ``make matrix`` and ``make families`` run them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.families import ROLLOUTS, live_run, write

pytestmark = pytest.mark.long

TENSOR = "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"
PIPELINE = "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
TWO_PER_ENGINE = "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2"
RUNS = {
    "qwen2, tied": f"{TENSOR} --colocate {TWO_PER_ENGINE} --rollout-temperature 0.7",
    "llama": f"{PIPELINE} --rollout-num-gpus 2 --update-weight-transport disk",
    "qwen3_moe": f"{TENSOR} --rollout-num-gpus 1 --sequence-parallel --use-routing-replay --num-steps-per-rollout 2",
}
"""Family -> flags. Routes are replayed where a rollout has several steps; the first is compared."""
CLOSE = {"qwen2, tied": 1e-4, "llama": 1e-4, "qwen3_moe": 5e-3}
"""Where a router prefers an expert by less than rounding, learner and engine may take different ones: one such token is
some 1e-4 of the mean."""


@pytest.mark.parametrize("family", RUNS)
def test_a_family_trains_and_agrees_with_its_engines_before_and_after_updates(family: str, tmp_path: Path) -> None:
    model = write(family, tmp_path / "model", num_hidden_layers=4)
    rows = live_run(model, tmp_path / "run", *RUNS[family].split())
    assert len(rows) == ROLLOUTS
    assert all(row["parity/tokens"] >= 16 for row in rows)
    assert all(0 < row["parity/mean"] < CLOSE[family] for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)
    samples = (tmp_path / "run" / "samples" / "train-000002.jsonl").read_text().splitlines()
    assert {tuple(json.loads(sample)["weight_versions"]) for sample in samples} == {("2",)}
