"""One rollout trained in every kind of layout gives what one rank gives, one rank what torch gives.

``python -m campaigns.exactness --small`` trains once; ``make layouts`` runs all cases in all layouts,
``make mutants`` shows that the comparison notices learners that are broken on purpose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BOUND = 1e-5
METRIC_BOUND = 5e-5
"""Some are differences of log-probs, whose last bits are up to 8e-6 of them."""

STEP_BOUND = 2e-3
ROWS = {
    "one rank to torch": ("clipped", "gspo", "divisor", "tokens", "tied", "experts"),
    "DP2": ("clipped", "tokens", "corrected"),
    "TP2 SP": ("clipped", "gspo", "experts"),
    "PP2xVPP2": ("clipped", "divisor", "tokens", "tied", "experts"),
    "CP2": ("clipped", "gspo", "divisor", "tokens", "corrected", "ppo"),
    "EP2": ("experts",),
    "TP2 SPxEP2 ETP1": ("experts",),
    "CP2xDP2": ("gspo", "tokens"),
    "TP2xPP2": ("clipped",),
    "PP2xEP2": ("experts",),
    "TP2 SPxEP2": ("experts",),
}
NAMES = [(layout, case) for layout, cases in ROWS.items() for case in cases]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("exactness") / "found.json"
    words = [sys.executable, "-m", "campaigns.exactness", "--small", "--no-mutants", "--json", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert target.exists(), done.stderr
    return json.loads(target.read_text())


@pytest.fixture(scope="module")
def rows(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["layout"], row["case"]): row for row in found["rows"]}


def test_every_case_is_trained_in_its_layouts(rows):
    assert rows.keys() == set(NAMES)


@pytest.mark.parametrize(("layout", "case"), NAMES)
def test_a_layout_finds_the_loss_the_metrics_and_the_gradients_of_one_rank(rows, layout, case):
    row = rows[layout, case]
    assert not row["failure"]
    assert row["loss"] <= BOUND
    assert row["grad_norm"] <= BOUND
    assert row["metric"] <= METRIC_BOUND, row["where"]
    assert row["gradient"] <= BOUND, row["where"]


@pytest.mark.parametrize(("layout", "case"), NAMES)
def test_a_layout_steps_as_one_rank_does_and_all_its_ranks_hold_the_same(rows, layout, case):
    row = rows[layout, case]
    assert row["change"] <= STEP_BOUND, row["where"]
    assert row["ranks"] == 0.0
