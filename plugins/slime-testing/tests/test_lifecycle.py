"""Lifecycle hooks that are wrong in one place; those of learner ranks run in two real processes."""

from __future__ import annotations

import pytest

from slime_testing import LifecycleSuite
from slime_testing.suite import PropertyViolation, properties

SOURCE = """
import torch
import torch.distributed as dist
from slime_core import hookimpl

seen = {"rollouts": 0}

@hookimpl
def slime_after_rollout(samples):
    seen["rollouts"] += 1
    samples[0].reward = 2 * samples[0].reward

@hookimpl
def slime_before_train_step(step):
    norm = torch.ones(1) * step.learner.rank
    dist.all_reduce(norm)

@hookimpl
def slime_run_end(run, error):
    pass

@hookimpl
def slime_checkpoint_state(place):
    return {"rollouts": seen["rollouts"]}

@hookimpl
def slime_checkpoint_restore(place, state):
    seen["rollouts"] = state["rollouts"]
"""
REDUCED = "    dist.all_reduce(norm)"
DOUBLED = "samples[0].reward = 2 * samples[0].reward"
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
QUICK = {
    "misspelt": ("def slime_run_end", "def slime_run_ends", "the_plugin_implements_hooks_that_slime_calls"),
    "async": ("def slime_run_end", "async def slime_run_end", "the_plugin_implements_hooks_that_slime_calls"),
    "no hook at all": (SOURCE, "x = 1", "the_plugin_implements_hooks_that_slime_calls"),
    "an observer that fails": (
        "def slime_run_end(run, error):\n    pass",
        "def slime_run_end(run, error):\n    run.folder.nothing",
        "the_hooks_of_the_driver_run",
        "AttributeError",
    ),
    "samples taken": (DOUBLED, "samples.pop()", "the_hooks_of_the_sampler_leave_samples_whole"),
    "a reward that is not a number": (
        DOUBLED,
        "samples[0].reward = float('nan')",
        "the_hooks_of_the_sampler_leave_samples_whole",
    ),
    "a mask of the tokens": (
        DOUBLED,
        "samples[0].loss_mask = [1] * len(samples[0].tokens)",
        "the_hooks_of_the_sampler_leave_samples_whole",
    ),
    "a state that does not come back": (
        'seen["rollouts"] = state["rollouts"]',
        'seen["rollouts"] = state["rollouts"] + 1',
        "a_checkpoint_brings_the_state_back",
    ),
    "a restore that does nothing": (
        'seen["rollouts"] = state["rollouts"]',
        "pass",
        "a_checkpoint_brings_the_state_back",
    ),
    "a restore that does nothing on the driver": (SOURCE, DRIVER, "a_checkpoint_brings_the_state_back"),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_hook_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = QUICK[name]
    violation(LifecycleSuite, broken(SOURCE, old, new), prop, *error)


def test_a_collective_on_one_rank_is_found_with_its_hook_and_its_stack(broken, violation):
    alone = broken(SOURCE, REDUCED, f"    if step.learner.rank == 0:\n    {REDUCED}")
    message = violation(LifecycleSuite, alone, "no_hook_hangs_on_two_ranks", limit_s=5.0)
    assert "slime_before_train_step, which rank 1" in message
    assert "all_reduce" in message
    assert "mine.py" in message


def test_a_hook_that_fails_on_one_rank_is_reported_with_the_rank(broken, violation):
    failing = broken(SOURCE, REDUCED, f"{REDUCED}\n    assert step.learner.rank == 0, 'only one'")
    message = violation(LifecycleSuite, failing, "no_hook_fails_on_two_ranks", "AssertionError")
    assert "on rank 1 failed with" in message


def test_the_hooks_of_a_rank_see_what_a_run_hands_them_and_must_take_their_state_back(suite_of):
    tested = suite_of(LifecycleSuite, RANK)()
    tested.test_no_hook_hangs_on_two_ranks()
    tested.test_no_hook_fails_on_two_ranks()
    with pytest.raises(PropertyViolation, match="checkpoint"):
        tested.test_a_checkpoint_brings_the_state_back()


def test_the_right_hooks_hold_every_property(suite_of):
    tested = suite_of(LifecycleSuite, SOURCE)
    for name in properties(LifecycleSuite):
        getattr(tested(), name)()
