"""A run with a critic on ranks of its own, on the real engines; ``tests/engines/test_layouts.py`` resumes critics."""

from __future__ import annotations

import math

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.e2e.conftest import BRIEF, Finished, slime, weights

SEPARATE = ("--critic-num-gpus", "1")
OF_THE_CRITIC = {
    "train/value_loss",
    "train/value_clip_fraction",
    "train/values",
    "train/returns",
    "train/explained_variance",
    "train/critic_grad_norm",
    "train/critic_lr",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, on_external: tuple[str, str]) -> Finished:
    """Three rollouts, the first of which trains the critic alone, on a rank of its own."""
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    sizes = ("--num-rollout", "3", "--num-critic-only-steps", "1", "--save-interval", "1", *BRIEF)
    where = ("--output-dir", folder, "--progress", "lines", *on_external)
    found = slime(folder, "run", "--plugin", "ppo", *where, *sizes, *SEPARATE)
    assert found.code == 0, found.errors + found.output
    return found


def test_the_critic_learns_in_every_rollout_and_the_actor_after_the_first(run: Finished) -> None:
    rows = run.rows[:3]
    assert all(row.keys() >= OF_THE_CRITIC for row in rows)
    assert [("train/pg_loss" in row) for row in rows] == [False, True, True]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["train/values"] == 0.0  # the head starts at 0
    assert rows[0]["train/returns"] == pytest.approx(rows[0]["train/value_loss"], rel=1e-5)  # rewards of 0 and 1
    assert rows[2]["train/values"] != 0.0


def test_a_rollout_of_the_critic_alone_leaves_the_actor_bit_for_bit(run: Finished) -> None:
    start = weights(ARITHMETIC / "model")
    assert weights(run.checkpoint(1) / "hf") == start
    assert weights(run.checkpoint(2) / "hf") != start
    assert (run.checkpoint(1) / "critic").is_dir()
