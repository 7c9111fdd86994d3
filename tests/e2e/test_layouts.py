"""Whole runs in layouts that differ in everything at once; ``make matrix`` runs them one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.matrix import LAYOUTS, deepen, settings
from slime_core.config.embedded import ARITHMETIC
from tests.e2e.conftest import train

CHOSEN = {
    "colocated, tensor 2, engine tensor 2": (),
    "pipeline 2, two engines, disk": ("--num-virtual-stages-per-pipeline-rank", "2"),
    "context 2": (),
}
"""Layout -> what it takes on besides."""


@pytest.mark.parametrize("name", CHOSEN)
def test_a_layout_trains_and_agrees_with_its_engines_under_the_temperature_of_the_run(name: str, tmp_path: Path):
    deepen(ARITHMETIC / "model", tmp_path / "model")
    layout = (*LAYOUTS[name].arguments, *CHOSEN[name], "--rollout-temperature", "0.7")
    run = train(tmp_path / "run", *settings(tmp_path / "model"), *layout)
    trained = [row for row in run.rows if "train/loss" in row]
    assert len(trained) == 3
    assert all(row["parity/tokens"] == row["rollout/response_tokens"] > 64 for row in trained)
    assert all(0 < row["parity/mean"] < 1e-5 and row["parity/max"] < 1e-3 for row in trained)
    assert "parity" not in run.errors
    assert all(row["train/grad_norm"] > 0 for row in trained)
    assert {tuple(sample["weight_versions"]) for sample in run.samples("train-000002.jsonl")} == {("2",)}
