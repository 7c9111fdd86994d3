"""Worked examples, from their own files for two steps, on real engines; ``make worked-examples`` runs the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import worked_examples
from tests.e2e.conftest import NO_EVAL
from tests.e2e.worked_examples import EXAMPLES, example

pytestmark = pytest.mark.long


def test_every_example_has_a_test() -> None:
    there = {path.parent.name for path in EXAMPLES.rglob("*.toml") if path.name != "pyproject.toml"}
    here = {name.removeprefix("test_") for name in {*globals(), *vars(worked_examples)} if name.startswith("test_")}
    elsewhere = {"arithmetic", "openai_agent", "recipes", "search_r1", "smollm2"}
    assert there <= here | elsewhere


def test_python_tool(tmp_path: Path, on_external: tuple[str, str]) -> None:
    run = example(tmp_path, "python_tool/run.toml", *NO_EVAL, *on_external, "--n-samples-per-prompt", "4")
    rows = run.samples("train-000000.jsonl")
    assert not [row for row in rows if row["status"] == "failed"]
    rollouts: dict[int, list[float]] = {}
    for row in rows:
        rollouts.setdefault(row["index"], []).append(row["reward"])
    # Right at once, or right or wrong after the output of Python.
    assert {tuple(rewards) for rewards in rollouts.values()} <= {(1.0,), (0.0, 1.0), (0.0, 0.0)}
    assert len(set(map(tuple, rollouts.values()))) > 1


def test_solve_and_select(tmp_path: Path, on_external: tuple[str, str]) -> None:
    run = example(tmp_path, "solve_and_select/run.toml", *NO_EVAL, *on_external, "--n-samples-per-prompt", "2")
    rows = run.samples("train-000000.jsonl")
    assert len(rows) == 8 * 2 * (4 + 1)
    assert run.rows[0]["agents/branches"] == 4
    assert run.rows[0]["train/train_rollout_logprob_max_diff"] < 1e-4
