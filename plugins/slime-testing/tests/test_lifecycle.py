"""Lifecycle hooks, right and broken in one place; those of learner ranks run in two real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_testing import LifecycleSuite
from slime_testing.suite import PropertyViolation

REDUCED = "    dist.all_reduce(norm)"
DOUBLED = "samples[0].reward = 2 * samples[0].reward"
END = "def slime_run_end(run, error):\n    pass"
RESTORED = 'seen["rollouts"] = state["rollouts"]'
SOURCE = f"""
import torch
import torch.distributed as dist
from slime_core import hookimpl

seen = {{"rollouts": 0}}

@hookimpl
def slime_after_rollout(samples):
    seen["rollouts"] += 1
    {DOUBLED}

@hookimpl
def slime_before_train_step(step):
    norm = torch.ones(1) * step.learner.rank
{REDUCED}

@hookimpl
{END}

@hookimpl
def slime_checkpoint_state(place):
    return {{"rollouts": seen["rollouts"]}}

@hookimpl
def slime_checkpoint_restore(place, state):
    {RESTORED}
"""
DRIVER = """
from slime_core import hookimpl

seen = {"version": 0}

@hookimpl
def slime_after_weight_sync(version):
    seen["version"] = version

@hookimpl
def slime_checkpoint_state(place):
    return seen

@hookimpl
def slime_checkpoint_restore(place, state):
    pass
"""
RANK = """
from slime_core import hookimpl

seen = {"roles": [], "losses": []}

@hookimpl
def slime_before_log_probs(role):
    seen["roles"].append(role)

@hookimpl
def slime_after_train_step(step):
    seen["losses"].append(step.metrics["loss"] + step.metrics["grad_norm"] + step.metrics["lr"])

@hookimpl
def slime_checkpoint_state(place):
    return seen if place == "rank" else None

@hookimpl
def slime_checkpoint_restore(place, state):
    assert seen["roles"] == 2 * ["reference", "actor"], "the order of a run"
"""
IMPLEMENTS = "the_plugin_implements_hooks_that_slime_calls"
WHOLE = "the_hooks_of_the_sampler_leave_samples_whole"
RESTORES = "a_checkpoint_brings_the_state_back"
BROKEN = {
    "misspelt": ("def slime_run_end", "def slime_run_ends", IMPLEMENTS, "ValueError"),
    "only registers": (SOURCE, "from slime_core import hookimpl\n@hookimpl\ndef slime_register(add): pass", IMPLEMENTS),
    "an observer that fails": (
        END,
        END.replace("pass", "run.nothing"),
        "the_hooks_of_the_driver_run",
        "AttributeError",
    ),
    "samples removed": (DOUBLED, "samples.pop()", WHOLE),
    "a reward that is not a number": (DOUBLED, "samples[0].reward = float('nan')", WHOLE),
    "a mask of the tokens": (DOUBLED, "samples[0].loss_mask = [1] * len(samples[0].tokens)", WHOLE),
    "restores another state": (RESTORED, f"{RESTORED} + 1", RESTORES),
    "restores nothing": (RESTORED, "pass", RESTORES),
    "restores nothing on the driver": (SOURCE, DRIVER, RESTORES),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_hook_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(LifecycleSuite, SOURCE, "", BROKEN[name])


def test_a_collective_on_one_rank_is_reported_with_its_hook_and_its_stack(violation: Callable[..., str]) -> None:
    alone = (REDUCED, f"    if step.learner.rank == 0:\n    {REDUCED}", "no_hook_hangs_on_two_ranks")
    message = violation(LifecycleSuite, SOURCE, "", alone, limit_s=5.0)
    for word in ("slime_before_train_step", "rank 1", "all_reduce", "mine.py"):
        assert word in message


def test_a_hook_that_fails_on_one_rank_is_reported_with_the_rank(violation: Callable[..., str]) -> None:
    fails = f"{REDUCED}\n    assert step.learner.rank == 0, 'only one'"
    case = (REDUCED, fails, "no_hook_fails_on_two_ranks", "AssertionError")
    assert "rank 1" in violation(LifecycleSuite, SOURCE, "", case)


def test_the_hooks_of_a_rank_see_the_arguments_of_a_run_and_must_restore_their_state(
    suite_of: Callable[..., Any],
) -> None:
    tested = suite_of(LifecycleSuite, RANK)()
    tested.test_no_hook_hangs_on_two_ranks()
    tested.test_no_hook_fails_on_two_ranks()
    with pytest.raises(PropertyViolation, match="checkpoint"):
        tested.test_a_checkpoint_brings_the_state_back()


def test_right_hooks_hold_every_property(holds: Callable[..., None]) -> None:
    holds(LifecycleSuite, SOURCE)
