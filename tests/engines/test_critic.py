"""One PPO rollout replayed in several layouts: values, returns, metrics and gradients of the critic are those of one
rank, and those of one rank are those of plain torch.

``campaigns/critic.py`` replays it once, on fresh ranks for every layout; ``make mutants`` shows that it notices
critics that are broken on purpose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
BOUND = 1e-5
LAYOUTS = ("Hugging Face", "DP2", "TP2", "TP2, SP", "PP2", "PP2, VPP2", "CP2", "PP2, tied", "CP2, constant divisor")
RESUMED = ("resumed, DP1", "resumed, TP2, SP")
NUMBERS = ("values", "returns", "metric", "gradient")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    target = tmp_path_factory.mktemp("critic") / "rows.json"
    words = [sys.executable, "-m", "campaigns.critic", "--no-mutants", "--json", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert target.exists(), done.stderr
    return {row["layout"]: row for row in json.loads(target.read_text())}


def test_every_layout_is_replayed(rows):
    assert rows.keys() == {*LAYOUTS, *RESUMED}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_critic_finds_the_values_and_the_gradients_of_one_rank(rows, name):
    row = rows[name]
    assert max(row[number] for number in NUMBERS) <= BOUND, row


@pytest.mark.parametrize("name", RESUMED)
def test_a_critic_continues_from_a_checkpoint_after_a_nap_as_if_nothing_had_been(rows, name):
    row = rows[name]
    assert max(row[number] for number in NUMBERS) <= (BOUND if "TP2" in name else 0.0), row
