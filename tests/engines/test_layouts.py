"""One rollout replayed in every layout: losses, norms, gradients and weights are those of one rank.

The replay is ``bench/layouts.py``, run once; it starts fresh ranks for every layout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "layouts.py"
BOUND = 1e-5
LAYOUTS = (
    "Hugging Face",
    "DP2",
    "TP2",
    "TP2, SP",
    "PP2",
    "PP2, VPP2",
    "CP2",
    "CP4",
    "TP2, SP, CP2",
    "TP2, PP2",
    "DP2, CP2",
    "CP2, sequence",
    "DP2, tokens",
    "TP2, tokens",
    "CP2, tokens",
    "PP2, tokens",
    "DP2, CP2, tokens",
    "PP2, tied",
    "EP2, experts",
    "TP2, SP, experts",
)
TRAINED = ("Hugging Face, trained", "float64, trained", "TP2, SP, trained", "CP2, trained")

pytestmark = pytest.mark.timeout(600)  # some thirty seconds on two idle cores


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    target = tmp_path_factory.mktemp("layouts") / "rows.json"
    done = subprocess.run([sys.executable, BENCH, "--json", target], capture_output=True, text=True, timeout=580)
    assert target.exists(), done.stderr
    return {row["layout"]: row for row in json.loads(target.read_text())}


def test_every_layout_is_replayed(rows):
    assert rows.keys() == {*LAYOUTS, *TRAINED}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_finds_the_loss_and_the_gradients_of_one_rank(rows, name):
    row = rows[name]
    assert row["loss"] <= BOUND
    assert row["grad_norm"] <= BOUND
    assert row["metric"] <= BOUND
    assert row["gradient"] <= BOUND, row["worst"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "Hugging Face"])
def test_a_layout_steps_to_the_weights_of_one_rank(rows, name):
    assert rows[name]["weights"] <= 1e-6  # a hundredth of the learning rate


@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_leave_only_what_float32_rounds(rows, name):
    # Where the terms of a gradient nearly cancel, one rank itself is 1e-5 away from float64.
    row = rows[name]
    assert max(row["loss"], row["grad_norm"], row["metric"]) <= BOUND
    assert row["gradient"] <= 1e-4, row["worst"]
