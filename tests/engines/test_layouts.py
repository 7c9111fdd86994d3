"""One rollout trained in every kind of layout gives what one rank gives, one rank what torch gives.

``campaigns.exactness --small`` trains once, ``campaigns.critic`` one PPO rollout; ``make layouts`` runs all cases in
all layouts, ``make mutants`` shows that the comparisons notice learners and critics that are broken on purpose.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.conftest import campaign

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
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    target = tmp_path_factory.mktemp("exactness") / "found.json"
    found = campaign("exactness", target, "--small", "--no-mutants")["rows"]
    assert {(row["layout"], row["case"]) for row in found} == set(NAMES)
    return {(row["layout"], row["case"]): row for row in found}


@pytest.mark.parametrize(("layout", "case"), NAMES)
def test_a_layout_finds_the_loss_the_metrics_and_the_gradients_of_one_rank_and_steps_as_it(rows, layout, case) -> None:
    row = rows[layout, case]
    assert not row["failure"]
    assert row["loss"] <= BOUND
    assert row["grad_norm"] <= BOUND
    assert row["metric"] <= METRIC_BOUND, row["where"]
    assert row["gradient"] <= BOUND, row["where"]
    assert row["change"] <= STEP_BOUND, row["where"]
    assert row["ranks"] == 0.0


CRITICS = ("Hugging Face", "DP2", "TP2", "TP2, SP", "PP2", "PP2, VPP2", "CP2", "PP2, tied", "CP2, constant divisor")
RESUMED = ("resumed, DP1", "resumed, TP2, SP")


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found = campaign("critic", tmp_path_factory.mktemp("critic") / "rows.json", "--no-mutants")
    assert {row["layout"] for row in found} == {*CRITICS, *RESUMED}
    return {row["layout"]: row for row in found}


@pytest.mark.long
@pytest.mark.parametrize("name", CRITICS + RESUMED)
def test_a_critic_finds_the_values_and_the_gradients_of_one_rank_also_resumed_after_a_nap(critics, name) -> None:
    row = critics[name]
    bound = 0.0 if name == "resumed, DP1" else BOUND
    assert max(row[number] for number in ("values", "returns", "metric", "gradient")) <= bound, row
