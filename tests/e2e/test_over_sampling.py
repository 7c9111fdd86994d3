"""A run with over-sampling, partial rollout and interleaved evaluation, on the real engines."""

from __future__ import annotations

import random

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.e2e.conftest import Finished, require_ledger, train
from tests.long_responses import long_responses

BATCH, OVER, STEPS = 8, 12, 3
SIZES = ("--rollout-batch-size", BATCH, "--over-sampling-batch-size", OVER, "--n-samples-per-prompt", "4")
LONGEST = 100
"""Tokens of the longest responses; others are shorter, so that some are in flight when a rollout is complete."""

LATE = '''
"""The evaluation of the start weights sends its requests some time after the first optimizer step."""

import asyncio
import time
from pathlib import Path

from slime_core import hookimpl
from slime_core.generation import generate_group

TRAINED = Path("<trained>")
LIMIT_S = 900


@hookimpl
def slime_register(add):
    add.generate_function("late", Late, scope="group", summary="Late")


@hookimpl
def slime_after_train_step():
    TRAINED.touch()


class Late:
    def __init__(self, options, run):
        pass

    async def __call__(self, context, samples, sampling):
        end = time.monotonic() + LIMIT_S
        if not TRAINED.exists():
            while not TRAINED.exists() and time.monotonic() < end:
                await asyncio.sleep(0.1)
            await asyncio.sleep(3)  # weights that did not wait for this evaluation arrive meanwhile
        return await generate_group(context, samples, sampling)
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, on_external: tuple[str, str]) -> Finished:
    """Three rollouts; every step is evaluated on the policy's engine while the next one is generated."""
    folder = tmp_path_factory.mktemp("over") / "run"
    lengths = long_responses(folder.with_name("prompts.jsonl"), LONGEST, random.Random(1))
    late = folder.with_name("late.py")
    late.write_text(LATE.replace("<trained>", str(folder.with_name("trained"))))
    held_out = f"{ARITHMETIC / 'data' / 'held_out.jsonl'}@[0:16]"
    few = f"name = 'few', path = '{held_out}', rm_type = 'exact_match', generate_function = 'late'"
    evaluation = ("--eval-interleaved", "--eval-interval", "1", "--eval-prompt-data", "none", "--eval-datasets", few)
    # A checkpoint waits for evaluations too: only new weights wait for that of the start weights.
    how = ("--apply-chat-template", "--num-rollout", STEPS, "--partial-rollout", "--save-interval", "2")
    return train(folder, *map(str, (*how, "--plugin", late, *SIZES, *lengths, *evaluation, *on_external)))


def test_more_prompts_are_started_than_a_rollout_takes_and_none_is_lost(run: Finished) -> None:
    assert [len({one["group"] for one in run.samples(f"train-{step:06d}.jsonl")}) for step in range(STEPS)] == [8] * 3
    for step in (2, 3):
        cursor = run.cursor(step)
        assert cursor["source"]["source"]["next"] == OVER + (step - 1) * BATCH
        # Most are aborted; some may have finished just before.
        assert len(cursor["source"]["held"]) + len(cursor["finished"]) == OVER - BATCH
    require_ledger(run.folder)


def test_aborted_responses_are_resumed_with_the_next_weights(run: Finished) -> None:
    samples = [one for step in (1, 2) for one in run.samples(f"train-{step:06d}.jsonl")]
    versions = [one["weight_versions"] for one in samples]
    resumed = [found for found in versions if len(set(found)) == 2]
    assert resumed
    assert all(found == sorted(found) for found in versions)


def test_every_evaluation_has_one_version_of_the_weights_and_its_row(run: Finished) -> None:
    assert [row["eval/weight_version"] for row in run.rows] == [0.0, 1.0, 2.0, 3.0]
    assert run.rows[0]["eval/few"] > 0
    assert all("perf/eval_waited_time" in row for row in run.rows[:3])  # of evaluations that run concurrently
    for step, row in enumerate(run.rows):
        samples = run.samples(f"eval-few-{step:06d}.jsonl")
        assert {tuple(one["weight_versions"]) for one in samples} == {(str(step),)}
        assert row["eval/few"] == pytest.approx(sum(one["reward"] for one in samples) / 16)
