"""The rules of optimizer steps, micro-batches and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.layout_rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["BATCHES"]


def _batches_add_up(config: RunConfig) -> Iterator[str]:
    prompts, responses = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    size, steps = config.learner.global_batch_size, config.learner.num_steps_per_rollout
    total = config.samples_per_rollout
    left = f"rollout_batch_size x n_samples_per_prompt = {prompts} x {responses} = {total}"
    if size and steps and size * steps != total:
        right = f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
        yield f"{left}, but {right}; they must be equal, or leave one of the latter two out"
    elif size and not steps and total % size:
        yield f"{left}, which global_batch_size = {size} does not divide; choose a divisor of {total}"
    elif steps and not size and total % steps:
        yield f"{left}, which num_steps_per_rollout = {steps} does not divide; choose a divisor of {total}"


def _schedule_is_possible(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    if settings.min_lr > settings.lr:
        yield f"min_lr = {settings.min_lr} is above lr = {settings.lr}; the learning rate falls from lr to min_lr"
    if settings.lr_decay_iters is not None and settings.lr_decay_iters <= settings.lr_warmup_iters:
        decay, warmup = settings.lr_decay_iters, settings.lr_warmup_iters
        yield f"lr_decay_iters = {decay} must be above lr_warmup_iters = {warmup}; both count from the first step"


BATCHES: dict[Rule, str] = {
    _batches_add_up: "rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout",
    _schedule_is_possible: "lr min_lr lr_decay_iters lr_warmup_iters",
}
"""Rule -> the settings it reads."""
