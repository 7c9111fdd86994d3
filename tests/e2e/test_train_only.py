"""A recorded rollout gives the stored losses, gradient norms and other metrics, whatever the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import train as train_run
from tests.golden.train_only import ALL, CASES, STORED, train

WANTED = json.loads(STORED.read_text())


SHORT = "grpo"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORT else [pytest.mark.long]) for name in CASES]
)
def test_training_on_a_recorded_rollout_gives_the_stored_metrics(name: str) -> None:
    steps = [row["metrics"] for row in train(name)]
    assert len(steps) == len(WANTED[name])
    for step, wanted in zip(steps, WANTED[name], strict=True):
        assert step.keys() == wanted.keys()
        for key, value in wanted.items():
            # Differences of log-probs lose digits: with other CPU kernels some moved by 2e-5 of themselves.
            rel = 1e-4 if "logprob" in key else 1e-5
            assert step[key] == pytest.approx(value, rel=rel, abs=1e-6), key


SLOW_RANK = """
import time

from slime_core import hookimpl


@hookimpl
def slime_learner_start(learner):
    if learner.rank == 1:
        from slime_core.learner import trained_model

        fast = trained_model.response_log_probs

        def slow(*arguments, **options):
            time.sleep(15)
            return fast(*arguments, **options)

        trained_model.response_log_probs = slow
"""


@pytest.mark.long
def test_a_slow_rank_is_named_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_RANK)
    run = train_run(tmp_path / "run", *ALL.split(), "--plugin", tmp_path / "slow.py", "--actor-num-gpus-per-node", "2")
    (warning,) = (line for line in (run.output + run.errors).splitlines() if "learner rank 1 on node" in line)
    assert re.search(r"learner rank 1 on node [\d.]+ .*[\d.]+ times ", warning)
    assert all(0 < row["perf/rank_memory/mean"] <= row["perf/rank_memory/max"] < 8 for row in run.rows)
